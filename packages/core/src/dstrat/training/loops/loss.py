"""The loss in what ``training_step`` returned, and what is said where there is none that can be trained with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.errors import MisuseError
from dstrat.training.dispatch import overrides
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

_WANTED = "return the loss, a tensor with one element that depends on the parameters, or a dict with it as 'loss'"


def no_loss(outputs: Any) -> MisuseError:
    """Return the error for outputs without a tensor as the loss."""
    if isinstance(outputs, Mapping) and "loss" in outputs:
        return MisuseError(f"training_step returned a dict whose 'loss' is {_described(outputs['loss'])}: {_WANTED}")
    if isinstance(outputs, Mapping):
        keys = ", ".join(map(repr, outputs)) or "nothing"
        return MisuseError(f"training_step returned a dict with {keys} and without 'loss': {_WANTED}")
    return MisuseError(f"training_step returned {_described(outputs)}: {_WANTED}")


def unusable_loss(outputs: Any, module: nn.Module) -> MisuseError | None:
    """Return the error for a loss of which no gradients can be computed; None for any other.

    Args:
        outputs: What ``training_step`` returned, with a tensor as the loss.
        module: Whose step it was.
    """
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    if not isinstance(loss, Tensor):
        return None
    shape = f"a loss of shape {tuple(loss.shape)}"
    if loss.numel() != 1:
        return MisuseError(f"training_step returned {shape}: return one number, such as loss.mean()")
    if loss.is_complex():
        return MisuseError(f"training_step returned {shape} and {loss.dtype}: return a real number, such as loss.abs()")
    if loss.requires_grad:
        return None
    if not any(parameter.requires_grad for parameter in module.parameters()):
        return MisuseError(
            f"training_step returned {shape} without gradients, as no parameter of {type(module).__name__} requires "
            "them: unfreeze some, by parameter.requires_grad_(True)"
        )
    return MisuseError(
        f"training_step returned {shape} that does not depend on the parameters, so that there are no gradients: "
        "look for detach(), item(), no_grad() or argmax() on the way from the layers to the loss"
    )


def closure_not_called(module: TrainModule, optimizer: Optimizer) -> MisuseError:
    """Return the error for an optimizer step in which no loss was computed.

    Args:
        module: Which may have an ``optimizer_step``.
        optimizer: Of the step.
    """
    if overrides(module, "optimizer_step", TrainModule):
        caller, advice = type(module).__name__, "call optimizer.step(closure=optimizer_closure) in it"
        method = "optimizer_step"
    else:
        caller, method = type(optimizer).__name__, "step"
        advice = (
            "call it there, or define optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure) in the "
            "module, which calls optimizer_closure() before optimizer.step()"
        )
    return MisuseError(
        f"{caller}.{method} did not call the closure, which computes the loss and its gradients, so that nothing would "
        f"be trained: {advice}"
    )


def _described(value: Any) -> str:
    return f"{value!r} ({type(value).__name__})" if isinstance(value, int | float | str) else type(value).__name__
