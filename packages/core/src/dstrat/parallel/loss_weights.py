"""Weights of losses: the gradient of an optimizer step is that of their weighted mean."""

from __future__ import annotations

import math
from numbers import Real
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import ConflictError, MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.strategy import Strategy


class LossWeights:
    """The weights of the losses of an optimizer step, over all batches and data-parallel ranks that are in it.

    The gradient of the step is that of ``sum(weight * loss) / sum(weight)``.  The total weight is known after the last
    batch only, so each loss is multiplied by its weight divided by a reference: the mean over the ranks of their
    weights of the first batch, which keeps gradients in the range of 16 bits.  Before the step, gradients are
    multiplied once by the reference divided by the mean total.  For a step of one batch that is 1, and left out.
    Strategies average gradients over ranks, so that means over ranks take the place of sums.

    Everything is computed on the device, and no value is read from it.

    Args:
        strategy: The strategy, which averages gradients.

    Attributes:
        is_used: Whether losses have weights, on all ranks; None before the first loss.
        latest: The weight of the last loss, on this rank.
        total: The sum of the weights of the step, on this rank.
        reference: The number by which weights are divided.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.is_used: bool | None = None
        self.total = self.reference = self.latest = torch.ones(())
        self._is_single = True

    def agree(self, *, has_weight: bool, caller: str, batch: str, advice: str) -> None:
        """Agree with the other ranks on the use of weights, with the first loss; collective then.

        Args:
            has_weight: Whether this rank has a weight for its loss.
            caller: Subject and verb of the error, such as ``"training_step returned"``.
            batch: Description of the batch for it.
            advice: What to do for every batch or for none.

        Raises:
            MisuseError: Other ranks, or earlier batches, decided otherwise.
            ConflictError: The strategy cannot weigh losses.
        """
        strategy = self._strategy
        if self.is_used is None:
            self.is_used = has_weight
            if strategy.world_size > 1:
                self.is_used = strategy.reduce_boolean_decision(has_weight, all=False)
        if has_weight and not strategy.weighs_losses:
            raise ConflictError(
                f"{caller} a weight with the loss of {batch}, and {type(strategy).__name__} cannot weigh losses as it "
                "is set up, since it does not average the gradients of all processes in each step, or cannot scale "
                "them: leave the weight out, or choose another strategy"
            )
        if has_weight is not self.is_used:
            received, expected = ("a", "none") if has_weight else ("no", "one")
            rank, sources = "", "earlier batches"
            if strategy.world_size > 1:
                rank = f" on rank {strategy.global_rank} of {strategy.world_size}"
                sources = "other ranks or earlier batches"
            raise MisuseError(
                f"{caller} {received} weight with the loss of {batch}{rank}, and {expected} with those of {sources}, "
                f"which have no weighted mean then: {advice} for every batch, or for none"
            )

    def scale(self, loss: Tensor, weight: Any, *, is_first: bool) -> Tensor:
        """Return the loss whose gradients are to be computed; collective for the first batch of a step.

        The loss of a batch without weight may be nan, such as the mean over no labels; it counts for nothing.

        Args:
            loss: The mean loss of a batch, a scalar.
            weight: A number, or a tensor with one element.
            is_first: Whether it is the first batch of an optimizer step.

        Raises:
            MisuseError: The weight is no such value, or a negative one.
        """
        local = self.latest = _on_device(checked_weight(weight), self._strategy.root_device)
        self._is_single = is_first
        if is_first:
            mean = self._strategy.mean_weight(local)
            self.reference = torch.where(mean > 0, mean, torch.ones_like(mean))
            self.total = local
        else:
            self.total = self.total + local
        return torch.where(local > 0, loss, torch.zeros_like(loss)) * (local / self.reference)

    def correction(self) -> Tensor | float:
        """Return the factor of the gradients of a step, after its last batch; collective if there were several."""
        return 1.0 if self._is_single else self.correction_of(self.total)

    def correction_of(self, total: Tensor) -> Tensor:
        """Return the factor of gradients of several losses, from their total weight on this rank; collective."""
        mean = self._strategy.mean_weight(total)
        return torch.where(mean > 0, self.reference / mean, torch.ones_like(mean))  # else all gradients are 0

    # State, for a resume between the batches of a step

    def state_dict(self) -> dict[str, float] | None:
        """Return the weights of the batches of this rank since the last step; None if losses have none."""
        if not self.is_used:
            return None
        return {"total": float(self.total), "reference": float(self.reference)}

    def load_state_dict(self, state: Mapping[str, float] | None, factor: float = 1.0) -> None:
        """Restore the weights of the batches whose gradients were restored.

        Args:
            state: The result of :meth:`state_dict`.
            factor: The factor of the gradients.
        """
        self.is_used = state is not None
        if state is not None:
            device = self._strategy.root_device
            self.total = _on_device(state["total"] * factor, device)
            self.reference, self._is_single = _on_device(state["reference"], device), False


def checked_weight(weight: Any) -> float | Tensor:
    """Return a weight as a float, or as a tensor if it is on a device from which no value should be read.

    Raises:
        MisuseError: It is not a number of at least 0, nor a tensor with one element.
    """
    if isinstance(weight, Tensor) and weight.numel() == 1 and not weight.is_complex():
        if not weight.is_cpu:
            return weight.detach().reshape(())
        weight = weight.item()
    if not isinstance(weight, Real) or not 0 <= float(weight) < math.inf:
        shown = f"tensor of shape {tuple(weight.shape)}" if isinstance(weight, Tensor) else repr(weight)
        raise MisuseError(
            f"the weight of a loss is {shown}: give the number of labels or samples that the loss is the mean of, a "
            "number or a tensor with one element"
        )
    return float(weight)


def _on_device(weight: float | Tensor, device: torch.device) -> Tensor:
    """Return a weight as a scalar in float32, whose sums of whole numbers are exact up to 16 millions."""
    if isinstance(weight, Tensor):
        return weight.to(device, torch.float32)
    # From the host, and with a dimension: a lazy device takes another number for another graph.  Non-blocking, as a
    # copy would otherwise wait for the device.
    return torch.tensor([weight], dtype=torch.float32).to(device, non_blocking=True).reshape(())
