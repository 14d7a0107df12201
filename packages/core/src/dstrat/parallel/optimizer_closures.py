"""Closures of optimizer steps: whether an optimizer needs one that computes the loss."""

from __future__ import annotations

import contextlib
import warnings
import weakref
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import MisuseError
from dstrat.parallel.optimizer_checks import ELEMENT_WISE, PROBE_SHAPE, copy_with

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from torch import Tensor
    from torch.optim import Optimizer


def closure_of_computed(
    optimizer: Optimizer, advice: str, prepare: Callable[[], None] | None = None
) -> Callable[[], None]:
    """Return a closure for a step whose gradients have been computed; it computes none.

    It raises an error if the optimizer calls it for the loss of weights that it has changed: optimizers such as those
    of sharpness-aware minimization (SAM) go on with the gradients of that loss, which would be missing.  No error are
    changes by hooks of the step, nor by wrappers that pass the closure on late and need no loss.

    Args:
        optimizer: The optimizer, before its step.
        advice: How a program passes a closure that computes the loss.
        prepare: What the closure runs.

    Raises:
        MisuseError: The optimizer is torch's LBFGS, which needs the loss too.
    """
    if isinstance(optimizer, torch.optim.LBFGS):
        raise MisuseError(f"{type(optimizer).__name__} computes its loss several times in one step: {advice}")
    run = prepare or _nothing
    if type(optimizer) in ELEMENT_WISE:
        return run
    before = _states_in_step(optimizer)

    def run_once() -> None:
        # In a compiled step the check would be traced, with guards on each parameter.
        if not torch.compiler.is_compiling() and _needs_another_loss(optimizer, before):
            raise MisuseError(f"{type(optimizer).__name__} computes another loss in the course of its step: {advice}")
        run()

    return run_once


def _parameters_of(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _states_in_step(optimizer: Optimizer) -> list[tuple[int, bool]]:
    """Return numbers that change where a parameter is changed in place, or its gradient cleared."""
    parameters = _parameters_of(optimizer)
    return [(parameter._version, parameter.grad is None) for parameter in parameters]  # noqa: SLF001 - torch has no public name


def _needs_another_loss(optimizer: Optimizer, before: Sequence[tuple[int, bool]]) -> bool:
    """Return whether a step that has called its closure cannot go on with the gradients from before it."""
    now = _states_in_step(optimizer)
    if now == before:
        return False
    has_cleared = all(is_clear for _, is_clear in now) and not all(was_clear for _, was_clear in before)
    if has_cleared and not getattr(optimizer, "_optimizer_step_pre_hooks", None):
        return True
    return _fails_without_closure(optimizer)


def _once_for_each(answer: Callable[[Optimizer], bool]) -> Callable[[Optimizer], bool]:
    """Return a function that tries each optimizer once, as a hook may change weights in all of its steps."""
    answers: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()

    def known_answer(optimizer: Optimizer) -> bool:
        if optimizer not in answers:
            answers[optimizer] = answer(optimizer)
        return answers[optimizer]

    return known_answer


@_once_for_each
def _fails_without_closure(optimizer: Optimizer) -> bool:
    """Return whether a copy of an optimizer, which steps a small matrix, fails for want of a closure."""
    parameter = torch.ones(PROBE_SHAPE, device="cpu", requires_grad=True)
    parameter.grad = torch.ones_like(parameter)
    with _trial(optimizer):
        try:
            probe = copy_with(optimizer, 0, [parameter], 1.0)
        except Exception:  # noqa: BLE001 - any error of a third-party optimizer; what its step needs is unknown then
            return False
        try:
            type(probe).step(probe)
        except Exception:  # noqa: BLE001 - such as a TypeError, or an AssertionError
            return True
    return False


@contextlib.contextmanager
def _trial(optimizer: Optimizer) -> Iterator[None]:
    """Take the gradients of an optimizer away in a ``with`` block: a wrapper's copy has the same one within."""
    gradients = [(parameter, parameter.grad) for parameter in _parameters_of(optimizer)]
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        with warnings.catch_warnings(), torch.random.fork_rng([]):
            warnings.simplefilter("ignore")
            yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _nothing() -> None:
    """Do nothing: the gradients have been computed."""


def recomputes_loss(optimizer: Optimizer) -> bool:
    """Return whether the step of an optimizer needs the loss of weights that it has changed, as those of SAM do.

    Args:
        optimizer: The optimizer, of which a copy steps a small matrix when it is asked for first.
    """
    if type(optimizer) in ELEMENT_WISE or not optimizer.param_groups:
        return False
    if isinstance(optimizer, torch.optim.LBFGS):
        return True
    return _asks_for_another_loss(optimizer) and _fails_without_closure(optimizer)


@_once_for_each
def _asks_for_another_loss(optimizer: Optimizer) -> bool:
    """Return whether a copy of an optimizer, which steps a small matrix, calls its closure after it has changed it."""
    parameter = torch.ones(PROBE_SHAPE, device="cpu", requires_grad=True)

    def loss_of_step() -> Any:
        if bool((parameter != 1).any()):
            raise _LossAgainError
        return parameter.detach().sum()

    try:
        with _trial(optimizer):
            probe = copy_with(optimizer, 0, [parameter], 1.0)
            parameter.grad = torch.ones_like(parameter)
            type(probe).step(probe, loss_of_step)
    except _LossAgainError:
        return True
    except Exception:  # noqa: BLE001 - any error of a third-party optimizer, such as one without a closure
        return False
    return False


class _LossAgainError(Exception):
    """The closure of a trial was called for the loss of changed weights."""
