"""Optimizers whose steps are compiled: poptorch's counterpart of torch's, and its state on the device.

poptorch reads and writes the state of its own optimizers only, by PopART's names: ``Accl1___<parameter>`` is Adam's
first moment (graphcore/popart, willow/include/popart/tensornames.hpp; poptorch's tests/optimizers_test.py).
"""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import ConflictError, RequestError
from dstrat_ipu import runtime

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

_STEP = "Step___"
_STATES = {
    "SGD": {"Accl1___": "momentum_buffer", "Accl___": "momentum_buffer"},  # the name is that of PopART's variant of SGD
    "Adam": {"Accl1___": "exp_avg", "Accl2___": "exp_avg_sq", _STEP: "step"},
    "AdamW": {"Accl1___": "exp_avg", "Accl2___": "exp_avg_sq", _STEP: "step"},
    "RMSprop": {"Accl1___": "square_avg", "Accl2___": "grad_avg", "Accl3___": "momentum_buffer"},
}
_OPTIONS = {
    "SGD": ("lr", "momentum", "dampening", "weight_decay"),
    "Adam": ("lr", "betas", "eps", "weight_decay"),
    "AdamW": ("lr", "betas", "eps", "weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "weight_decay", "momentum", "centered"),
}
# The last one makes AdamW of Adam.
_REFUSED = ("nesterov", "amsgrad", "maximize", "differentiable", "decoupled_weight_decay")


class CompiledOptimizer:
    """The optimizer of a module, and the one that poptorch compiles.

    Both have the same groups, so a scheduler changes the learning rates of both.  A change is sent to the device
    before the next call.

    Args:
        optimizer: torch's SGD, Adam, AdamW or RMSprop, or poptorch's.
        max_grad_norm: Largest norm of all gradients, which poptorch clips within the step; None does not clip.

    Attributes:
        host: An optimizer of torch's class, which has the state after :meth:`fetch`.
        device: An optimizer of poptorch's class.
        state_is_pending: Whether the host's state has to be written to the device.

    Raises:
        RequestError: poptorch has no such optimizer.
        ConflictError: The optimizer clips by itself.
    """

    def __init__(self, optimizer: Optimizer, max_grad_norm: float | None) -> None:
        self.kind = _kind_of(optimizer)
        self.user_optimizer = optimizer
        self.state_is_pending = False
        if isinstance(optimizer, runtime.poptorch().optim.Optimizer):
            if max_grad_norm is not None:
                raise ConflictError(
                    f"gradient_clip_val={max_grad_norm!r} cannot reach poptorch.optim.{self.kind}, which clips within "
                    f"the compiled step: give it max_grad_norm={max_grad_norm!r}, and leave gradient_clip_val out"
                )
            self.device: Any = optimizer
            self.host: Optimizer = getattr(torch.optim, self.kind)(_groups(optimizer, self.kind))
        else:
            self.host, self.device = optimizer, _twin(optimizer, self.kind, max_grad_norm)
        self.link()
        self._sent = self._values()

    def link(self) -> None:
        """Share the same groups among all optimizers, also after a state was loaded."""
        groups = self.host.param_groups if self.host is self.user_optimizer else self.user_optimizer.param_groups
        self.host.param_groups = self.device.param_groups = groups

    def adopt_host_groups(self) -> None:
        """Share the groups of the host's optimizer among all, after a state was loaded into it."""
        self.user_optimizer.param_groups = self.host.param_groups
        self.link()

    def note_step(self) -> None:
        """Mark the optimizer as stepped, as torch's schedulers warn otherwise."""
        self.user_optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - set by torch's own step

    def has_changed(self) -> bool:
        """Return whether an option such as the learning rate has changed since the last call."""
        values = self._values()
        has_changed, self._sent = values != self._sent, values
        return has_changed

    def _values(self) -> list[dict[str, Any]]:
        return [{name: group.get(name) for name in _OPTIONS[self.kind]} for group in self.host.param_groups]

    def fetch(self, module: Module) -> None:
        """Copy the state from the device to :attr:`host`, if that of the device is newer.

        Args:
            module: The module, for the names of the parameters.
        """
        state = self.device.state_dict().get("ipu_state")
        if state is None or self.state_is_pending:  # no call has run, or what was loaded is not on the device yet
            return
        for name, parameter in _named(self.host, module):
            values = {
                key: value.clone()
                for prefix, key in _STATES[self.kind].items()
                for device_name, value in state.items()
                if _is_state_of(device_name, prefix, name)
            }
            if not values:  # SGD without momentum
                continue
            if "step" in values:
                values["step"] = values["step"].reshape(())
            elif self.kind == "RMSprop":
                values["step"] = torch.zeros(())  # torch counts steps, but does not use the number
            self.host.state[parameter] = values

    def write(self, module: Module) -> None:
        """Pass the state of :attr:`host` to poptorch, which copies it to the device with the next optimizer.

        Args:
            module: The compiled module, for the names of the parameters.
        """
        # It has the names, shapes and dtypes of the device, and what the host has no values for stays as it is.
        template = self.device.state_dict()
        state = dict(template["ipu_state"] or {})
        for name, parameter in _named(self.host, module):
            for prefix, key in _STATES[self.kind].items():
                value = self.host.state[parameter].get(key)
                device_name = next((full_name for full_name in state if _is_state_of(full_name, prefix, name)), None)
                if value is not None and device_name is not None:
                    state[device_name] = (
                        runtime.plain(value).to(state[device_name].dtype).reshape(state[device_name].shape).clone()
                    )
        self.device.set_state_dict({**template, "ipu_state": state})
        self.state_is_pending = False

    def restore_dtypes(self, module: Module, saved: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore the dtypes of loaded values, which torch has converted to those of the parameters.

        Args:
            module: The module, for the names of the parameters.
            saved: The state of each parameter, by its name.
        """
        for name, parameter in _named(self.host, module):
            for key, value in saved.get(name, {}).items():
                if isinstance(value, torch.Tensor) and value.is_floating_point():
                    self.host.state[parameter][key] = value.detach().clone()
        self.state_is_pending = True


def _kind_of(optimizer: Optimizer) -> str:
    for kind in ("SGD", "AdamW", "Adam", "RMSprop"):  # AdamW first: in current torch it is a subclass of Adam
        if isinstance(optimizer, getattr(torch.optim, kind)):
            break
    else:
        raise RequestError(
            f"poptorch cannot compile the step of {type(optimizer).__name__}: choose SGD, Adam, AdamW or RMSprop of "
            "torch.optim or poptorch.optim"
        )
    for group in optimizer.param_groups:
        refused = [name for name in _REFUSED if group.get(name) and not (kind == "AdamW" and name == _REFUSED[-1])]
        if refused:
            raise RequestError(f"poptorch cannot compile {kind} with {refused[0]}=True: leave it out")
        tensors = [name for name in _OPTIONS[kind] if isinstance(group.get(name), torch.Tensor)]
        if tensors:
            raise RequestError(f"{kind} has a tensor as {tensors[0]}, and poptorch takes numbers: pass a float")
    return kind


def _groups(optimizer: Optimizer, kind: str) -> list[dict[str, Any]]:
    """Return groups for a new optimizer, with the same parameters and options."""
    names = _OPTIONS[kind]
    return [
        {"params": list(group["params"]), **{name: group[name] for name in names if name in group}}
        for group in optimizer.param_groups
    ]


def _twin(optimizer: Optimizer, kind: str, max_grad_norm: float | None) -> Any:
    """Return poptorch's optimizer with the same options.

    Options that are passed may change from step to step; all others are constants of the graph.  They also decide
    which of PopART's variants of SGD is compiled.
    """
    cls = getattr(runtime.poptorch().optim, kind)
    groups = [optimizer.defaults, *optimizer.param_groups]
    parameters = inspect.signature(getattr(torch.optim, kind)).parameters
    options = {
        name: optimizer.defaults[name]
        for name in _OPTIONS[kind]
        if name in optimizer.defaults
        and (name == "lr" or any(group.get(name) != parameters[name].default for group in groups))
    }
    if max_grad_norm is not None:
        if kind == "RMSprop" or "max_grad_norm" not in inspect.signature(cls).parameters:
            raise ConflictError(
                f"gradient_clip_val={max_grad_norm!r} is not possible with {kind}, as this poptorch has no clipping "
                "within its step: leave it out, or choose AdamW"
            )
        options["max_grad_norm"] = max_grad_norm
    return cls(_groups(optimizer, kind), **options)


def _named(optimizer: Optimizer, module: Module) -> list[tuple[str, Tensor]]:
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [(names.get(id(parameter), str(index)), parameter) for index, parameter in enumerate(parameters)]


def _is_state_of(device_name: str, prefix: str, name: str) -> bool:
    """Return whether a tensor on the device is the state of a parameter, whose module is wrapped when compiled."""
    return device_name in (f"{prefix}module.{name}", f"{prefix}model.module.{name}")  # as poptorch before 3 had it
