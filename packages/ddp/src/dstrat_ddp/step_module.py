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
"""The attribute in which DistributedDataParallel finds the names of what it does not synchronize in a module."""


def ignored_names(module: Module) -> frozenset[str]:
    """Return the names of parameters and buffers that DistributedDataParallel does not synchronize."""
    if isinstance(module, SeparateModules):  # each of them has a wrapper
        return frozenset(f"{child}.{name}" for child, one in module.named_children() for name in ignored_names(one))
    return frozenset(getattr(module, _IGNORED, ()))


def pass_ignored_names(module: Module, outer: Module) -> None:
    """Let a wrapper of a module ignore what the user has excluded from synchronization there.

    Args:
        module: The user's.
        outer: The module that is wrapped instead, which has the user's as ``module``.
    """
    if names := ignored_names(module):
        setattr(outer, _IGNORED, [f"module.{name}" for name in names])


class StepWatch:
    """What is known of the step of WatchedSteps; apart from the module, because setting a module's attributes is slow.

    Attributes:
        is_running: Whether a step is being run now.
        after_step: Called after each step, before the wrapper looks at its output.
    """

    __slots__ = ("after_step", "is_running")

    def __init__(self) -> None:
        self.is_running = False
        self.after_step: Callable[[], None] | None = None


class WatchedSteps(StepModule):
    """A module whose forward runs a step of the user's module, and says that it is running.

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


# Saying which parameters got no gradient, where DistributedDataParallel gives up on them.


_TORCH_SAYS = "Expected to have finished reduction"
_INDICES = re.compile(r"did not receive grad for rank \d+: ((?:\d+ ?)+)")
_MOST_NAMES = 10


class ExplainedUnusedParameters:
    """A context that turns torch's error about an unfinished reduction into one that names parameters and a way out.

    Args:
        model: Whose reduction may be unfinished; it has just been made.
    """

    def __init__(self, model: DistributedDataParallel) -> None:
        self._model = model
        # Now, as torch numbers them: later some may be frozen for a while, as toggle_optimizer does.
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
        'Where that is meant, choose strategy="ddp_find_unused_parameters_true" or '
        "DDPStrategy(find_unused_parameters=True); otherwise use them in the loss, or freeze them before training"
    )


def _unused_names(reduced: list[str], message: str) -> list[str]:
    found = _INDICES.search(message)
    if found is None:
        return []
    return [reduced[index] for index in map(int, found[1].split()) if index < len(reduced)]


# Backward passes that a training step runs by itself, inside the forward of DistributedDataParallel.


class ManualBackward:
    """Prepares the averaging of gradients for each backward pass inside a step, and not again after the step.

    DistributedDataParallel by itself expects one backward pass, after its forward.

    Args:
        model: What the steps run in.
        watch: Knows when a step is running.
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
        """Let the next step average gradients and share buffers again."""
        if self._ran:
            self._ran = False
            self._model.require_backward_grad_sync = True
            self._model.require_forward_param_sync = True

    def _after_step(self) -> None:
        # Otherwise the end of the forward prepares for a backward pass that has been already.
        if self._ran:
            self._model.require_backward_grad_sync = False
