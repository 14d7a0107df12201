"""State in which a run has begun, for an elastic fit that begins again in the same process."""

from __future__ import annotations

import copy
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.data.random_state import RandomState
from dstrat.training.metrics.metric_objects import is_metric

if TYPE_CHECKING:
    from collections.abc import Sequence


class RunBeginning:
    """The state in which a run has begun: random numbers, and what modules, data module and callbacks have.

    A later beginning in the same process is like that in a new one: attributes that the run has set, the classes of
    modules, their submodules, parameters and buffers, hooks and which parameters are trained are as before, there are
    no gradients, and then the checkpoint's state is loaded.  Another object that was changed in place, such as a list,
    keeps its content.

    Args:
        module: The module of a run that has not prepared anything yet.
        datamodule: Its data module; None without one.
        callbacks: Its callbacks.

    Attributes:
        callbacks: The callbacks, without those that the run adds.
    """

    def __init__(self, module: nn.Module, datamodule: object = None, callbacks: Sequence[Any] = ()) -> None:
        self._random_state = RandomState.capture()
        self._module, self.callbacks = module, tuple(callbacks)
        objects = [*module.modules(), *([] if datamodule is None else [datamodule]), *callbacks]
        self._attributes = [(each, dict(each.__dict__)) for each in objects]
        self._buffers = {name: buffer.clone() for name, buffer in module.named_buffers() if not buffer.is_meta}
        self._is_trained = {name: parameter.requires_grad for name, parameter in module.named_parameters()}
        self._classes = [(each, type(each)) for each in module.modules()]
        self._members = [
            (value, copy.copy(value))
            for each in module.modules()
            for name, value in vars(each).items()
            if name in _MEMBERS and isinstance(value, dict | set)
        ]
        self._parameters = [
            (each, {name: _FirstParameter(path, name, value) for name, value in _parameters_of(each).items()})
            for path, each in module.named_modules()
        ]

    def find_replaced_parameter(self) -> str:
        """Return the name of a parameter that cannot be what it was at the beginning; empty if there is none."""
        each = ((module, first) for module, firsts in self._parameters for first in firsts.values())
        return next((first.full_name for module, first in each if not first.is_restorable(module)), "")

    @torch.no_grad()
    def restore(self) -> None:
        """Restore random numbers, modules, attributes, buffers, hooks and trained parameters, and reset metrics."""
        self._restore_modules()
        for name, parameter in self._module.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(self._is_trained.get(name, parameter.requires_grad))
        for name, buffer in self._module.named_buffers():
            value = self._buffers.get(name)
            if value is not None and value.shape == buffer.shape:  # another shape is a cache that has grown
                buffer.copy_(value)
        for layer in self._module.modules():
            if is_metric(layer):
                layer.reset()  # type: ignore[operator]  # of torchmetrics
        self._random_state.restore()

    def _restore_modules(self) -> None:
        # Found before what may hold the last reference to them is removed, such as the module of a parametrization.
        restored = [{name: first.find(module) for name, first in firsts.items()} for module, firsts in self._parameters]
        for each, attributes in self._attributes:
            each.__dict__.clear()
            each.__dict__.update(attributes)
        for module, first_class in self._classes:
            if type(module) is not first_class:  # a parametrization has made a class of its own
                module.__class__ = first_class
        for members, at_beginning in self._members:  # in place, as handles of hooks refer to these dicts
            members.clear()
            members.update(at_beginning)
        for (module, firsts), parameters in zip(self._parameters, restored, strict=True):
            _parameters_of(module).clear()
            _parameters_of(module).update(parameters)
            for first in firsts.values():
                first.restore_hooks()


_MEMBERS = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)} - {"_parameters"}


class _FirstParameter:
    """A parameter that a module has at the beginning, without its memory: a strategy may replace it by a shard.

    Args:
        path: Name of the module.
        name: Name of the parameter in it.
        parameter: The parameter; None of a layer without it, such as one without a bias.
    """

    def __init__(self, path: str, name: str, parameter: nn.Parameter | None) -> None:
        self.full_name = f"{path}.{name}" if path else name
        self._name, self._is_none = name, parameter is None
        self._shape = None if parameter is None or nn.parameter.is_lazy(parameter) else parameter.shape
        self._parameter = (lambda: None) if parameter is None else weakref.ref(parameter)
        self._hooks = [dict(hooks or {}) for hooks in _hooks_of(parameter)]

    def find(self, module: nn.Module) -> nn.Parameter | None:
        """Return the parameter, or the one that the module has now instead."""
        first: nn.Parameter | None = self._parameter()
        return first if first is not None or self._is_none else _parameters_of(module).get(self._name)

    def is_restorable(self, module: nn.Module) -> bool:
        """Return whether the parameter, or one of its shape in its place, exists."""
        current = self.find(module)
        return self._is_none or (current is not None and self._shape in (None, current.shape))

    def restore_hooks(self) -> None:
        """Let the parameter have the hooks of the beginning only."""
        for hooks, at_beginning in zip(_hooks_of(self._parameter()), self._hooks, strict=False):
            if hooks is not None:
                hooks.clear()
                hooks.update(at_beginning)


def _parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's own parameters; an empty one for a TorchScript module, which stays as it is."""
    parameters: Any = vars(module).get("_parameters")
    return parameters if isinstance(parameters, dict) else {}


def _hooks_of(parameter: nn.Parameter | None) -> list[dict[int, Any] | None]:
    """Return the hooks of a parameter's gradient."""
    if parameter is None:
        return []
    return [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # noqa: SLF001 - torch has no public names
