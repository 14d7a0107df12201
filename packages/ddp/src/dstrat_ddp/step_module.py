"""Modules that DistributedDataParallel wraps, so that a training step is its forward, and their backward passes."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.parallel import DistributedDataParallel

from dstrat.errors import ConflictError, MisuseError
from dstrat.parallel.step_module import StepModule
from dstrat_ddp import reducer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor
    from torch.nn import Module

    from dstrat.parallel.separate_modules import SeparateModules


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
        reducer.pass_ignored_names(module, self)

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
    match = _INDICES.search(message)
    indices = map(int, match[1].split()) if match else ()
    return unused_parameters_text([reduced[index] for index in indices if index < len(reduced)])


def unused_parameters_text(names: Sequence[str]) -> str:
    """Return what is wrong with parameters on which a loss does not depend, and what to do."""
    shown = ", ".join(names[:_MOST_NAMES]) or "some parameters"
    more = " and others" if len(names) > _MOST_NAMES else ""
    return (
        f"the loss does not depend on {shown}{more}, and ddp waits for a gradient of every trainable parameter. "
        'If that is intended, choose strategy="ddp_find_unused_parameters_true" or '
        "DDPStrategy(find_unused_parameters=True); otherwise use them in the loss, or freeze them before training"
    )


# Backward passes that the wrapper does not expect


class ExpectedBackward:
    """Prepares the reducer for each backward pass, also for those that no forward of the wrapper has announced.

    DistributedDataParallel expects one backward pass after its forward.  In any other one it would average nothing, so
    that processes went on with different weights: in one within a step (manual optimization), in the second one of a
    step, and in that of a loss that a method of the module has computed without a step.

    Args:
        model: The wrapper.
        watch: State of the step.
    """

    def __init__(self, model: DistributedDataParallel, watch: StepWatch) -> None:
        self._model = model
        self._watch = watch
        self._ran = self._is_expected = False
        watch.after_step = self._after_step

    def before_backward(self, loss: Tensor) -> None:
        """Prepare for the backward pass from a loss, unless the last step has.

        Raises:
            ConflictError: The wrapper has ``static_graph``.
        """
        is_in_step = self._watch.is_running
        is_expected, self._is_expected = self._is_expected and not is_in_step, False
        self._ran = self._ran or is_in_step
        if is_expected or not self._model.require_backward_grad_sync:  # false in no_sync, where nothing is reduced
            return
        expect_another(self._model, loss)

    def after_forward(self) -> None:
        """Re-enable the averaging of gradients and the broadcast of buffers for the next step."""
        if self._ran:
            self._ran = False
            self._model.require_backward_grad_sync = True
            self._model.require_forward_param_sync = True

    def _after_step(self) -> None:
        # Else the end of the wrapper's forward would prepare the reducer for a backward pass that has already run.
        if self._ran:
            self._model.require_backward_grad_sync = False
        else:
            self._is_expected = torch.is_grad_enabled() and self._model.require_backward_grad_sync


def expect_another(model: DistributedDataParallel, loss: Tensor) -> None:
    """Prepare a wrapper for a backward pass that its forward has not announced.

    Raises:
        ConflictError: The wrapper has ``static_graph``.
    """
    if model.static_graph:  # torch averages the first pass where it passes the output of the forward
        raise ConflictError(
            "static_graph=True needs one backward pass after each training step, and torch would not average the "
            "gradients of another one, such as those of manual optimization, which runs them within the step: "
            "leave static_graph out"
        )
    reducer.prepare_for_backward(model, loss)


# One DistributedDataParallel for each of several modules


class SeparateWrappers:
    """The wrappers of several modules.

    Args:
        modules: The modules; those without trainable parameters need no wrapper.
        wrap: Returns the wrapper of a module.
    """

    def __init__(self, modules: SeparateModules, wrap: Callable[[Module], Any]) -> None:
        self._modules = modules
        self._wrappers: dict[int, Any] = {}
        for module in modules.children():
            if any(parameter.requires_grad for parameter in module.parameters()):
                steps = StepModule(module)
                reducer.pass_ignored_names(module, steps)
                self._wrappers[id(module)] = wrap(steps)
        self._parallel = [one for one in self._wrappers.values() if isinstance(one, DistributedDataParallel)]
        self._explained = [ExplainedUnusedParameters(wrapper) for wrapper in self._parallel]
        self._is_expected = False  # a backward pass, after a step

    def __call__(self, step: Callable[..., Any], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run a step, which calls a function, in the wrappers of the modules that the function uses."""
        run: Callable[..., Any] = partial(step, function)
        # One wrapper in the other: each must see the forward pass of a step that uses its module.
        for module in self._modules.used_by(function):
            if id(module) in self._wrappers:
                run = partial(self._wrappers[id(module)], run)
        output = run(*args, **kwargs)
        self._is_expected = torch.is_grad_enabled()
        return output

    def before_backward(self, loss: Tensor) -> None:
        """Prepare for the backward pass from a loss, unless it is the first one after a step.

        All wrappers are prepared: one that the pass does not reach waits for nothing.

        Raises:
            ConflictError: The wrappers have ``static_graph``.
        """
        is_expected, self._is_expected = self._is_expected, False
        for wrapper in () if is_expected else self._parallel:
            if wrapper.require_backward_grad_sync:
                expect_another(wrapper, loss)

    def explained(self) -> AbstractContextManager[Any]:
        """Return a context that names parameters without a gradient in torch's error about them."""
        stack = ExitStack()
        for one in self._explained:
            stack.enter_context(one)
        return stack

    def no_sync(self) -> AbstractContextManager[Any]:
        """Return a context in which gradients accumulate without being averaged."""
        stack = ExitStack()
        for wrapper in self._parallel:
            stack.enter_context(wrapper.no_sync())
        return stack

    def check_finished(self) -> None:
        """Raise torch's error if a backward pass has reached some parameters of a module, and not all."""
        for wrapper in self._parallel:
            reducer.check_reduction_finished(wrapper)

    def release(self) -> None:
        """Free the reducers."""
        for wrapper in self._parallel:
            reducer.release_reducer(wrapper)
