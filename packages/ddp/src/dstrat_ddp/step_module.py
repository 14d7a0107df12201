"""Module that DistributedDataParallel wraps, so that a training step is its forward."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat.parallel.separate_modules import SeparateModules
from dstrat.parallel.step_module import StepModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor
    from torch.nn import Module
    from torch.nn.parallel import DistributedDataParallel


_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Attribute of a module with the names of parameters and buffers that DistributedDataParallel ignores."""


def ignored_names(module: Module) -> frozenset[str]:
    """Return the names of parameters and buffers that DistributedDataParallel does not synchronize."""
    if isinstance(module, SeparateModules):  # each of them has a wrapper
        return frozenset(f"{child}.{name}" for child, one in module.named_children() for name in ignored_names(one))
    return frozenset(getattr(module, _IGNORED, ()))


def pass_ignored_names(module: Module, outer: Module) -> None:
    """Copy the names that the user excluded from synchronization to an outer module.

    Args:
        module: The user's module.
        outer: The module that is wrapped instead, which has the user's as ``module``.
    """
    if names := ignored_names(module):
        setattr(outer, _IGNORED, [f"module.{name}" for name in names])


class StepWatch:
    """State of the step of WatchedSteps, in a separate object because setting attributes of a module is slow.

    Attributes:
        is_running: Whether a step is running.
        after_step: Called after each step, before the wrapper handles its output.
    """

    __slots__ = ("after_step", "is_running")

    def __init__(self) -> None:
        self.is_running = False
        self.after_step: Callable[[], None] | None = None


class WatchedSteps(StepModule):
    """Step module that records whether its step is running.

    Args:
        module: The user's module; its parameters appear under ``module.``.
    """

    def __init__(self, module: Module) -> None:
        super().__init__(module)
        self.watch = StepWatch()
        pass_ignored_names(module, self)

    def forward(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        watch = self.watch
        watch.is_running = True
        try:
            output = step(*args, **kwargs)
        finally:
            watch.is_running = False
        if watch.after_step is not None:
            watch.after_step()
        return output


# Error that names parameters without a gradient


_TORCH_SAYS = "Expected to have finished reduction"
_INDICES = re.compile(r"did not receive grad for rank \d+: ((?:\d+ ?)+)")
_MOST_NAMES = 10


class ExplainedUnusedParameters:
    """Context that replaces torch's error about an unfinished reduction by one with names of parameters and a hint.

    Args:
        model: The new wrapper, whose reduction may be unfinished.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        # Read now, as torch numbers them now: toggle_optimizer may freeze some later.
        self._reduced = [
            name.removeprefix("module.")
            for name, parameter in model.module.named_parameters()
            if parameter.requires_grad and name not in model.parameters_to_ignore
        ]

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, RuntimeError) and _TORCH_SAYS in str(error) and not self._model.find_unused_parameters:
            raise MisuseError(_explanation(self._reduced, str(error))) from error


def _explanation(reduced: list[str], message: str) -> str:
    names = _unused_names(reduced, message)
    shown = ", ".join(names[:_MOST_NAMES]) or "some parameters"
    more = " and others" if len(names) > _MOST_NAMES else ""
    return (
        f"the loss does not depend on {shown}{more}, and ddp waits for a gradient of every trainable parameter. "
        'If that is intended, choose strategy="ddp_find_unused_parameters_true" or '
        "DDPStrategy(find_unused_parameters=True); otherwise use them in the loss, or freeze them before training"
    )


def _unused_names(reduced: list[str], message: str) -> list[str]:
    match = _INDICES.search(message)
    if match is None:
        return []
    return [reduced[index] for index in map(int, match[1].split()) if index < len(reduced)]


# Backward passes within a training step (manual optimization)


class ManualBackward:
    """Prepares the reducer for each backward pass within a step, and not again after the step.

    DistributedDataParallel expects one backward pass, after its forward.

    Args:
        model: The wrapper.
        watch: State of the step.
    """

    def __init__(self, model: DistributedDataParallel, watch: StepWatch) -> None:
        self._model = model
        self._watch = watch
        self._ran = False
        watch.after_step = self._after_step

    def before_backward(self, loss: Tensor) -> None:
        """Prepare for the backward pass from a loss, if a step is running."""
        if not self._watch.is_running:
            return
        self._ran = True
        model = self._model
        if model.require_backward_grad_sync:
            searches = model.find_unused_parameters and not model.static_graph
            model.reducer.prepare_for_backward([loss] if searches else [])

    def after_forward(self) -> None:
        """Re-enable the averaging of gradients and the broadcast of buffers for the next step."""
        if self._ran:
            self._ran = False
            self._model.require_backward_grad_sync = True
            self._model.require_forward_param_sync = True

    def _after_step(self) -> None:
        # Else the end of the forward would prepare the reducer for a backward pass that has already run.
        if self._ran:
            self._model.require_backward_grad_sync = False
