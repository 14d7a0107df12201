"""Gradients of parameters that not every batch uses, which stages 1 to 3 else leave as they were, or leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from dstrat_deepspeed.gradient_order import GradientOrder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

_BUFFERS = "_DeepSpeedZeroOptimizer_Stage3__param_id_to_grad_partition"  # which DeepSpeed keeps private


class UnusedGradients(Protocol):
    """What makes gradients zero that no batch of a step has computed, and completes those that the last one has not."""

    def after_backward(self) -> None:
        """Clear what is left from before the first backward pass of a step."""

    def before_step(self) -> None:
        """Let the optimizer have the gradients that the last backward pass has not brought."""

    def forget(self) -> None:
        """Let the next backward pass be the first one of a step."""


def unused_gradients(optimizer: Any, *, sends_in_step: bool) -> UnusedGradients | None:
    """Return what sees to unused parameters; None where DeepSpeed does, as in stage 0.

    Args:
        optimizer: What DeepSpeed has made of the user's optimizer.
        sends_in_step: Whether it is the step in which DeepSpeed sends gradients to an optimizer on the CPU.
    """
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        return _OfStage3(optimizer, sends_in_step=sends_in_step)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _OfStages1And2(optimizer)
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        return _Of32Bits(optimizer)
    return None


class _OfStages1And2:
    """Passes after which gradients are reduced bring those of all parameters, so that nothing else is missing."""

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._initial = optimizer.micro_step_id
        self._order = GradientOrder(optimizer)

    def after_backward(self) -> None:
        """There is nothing left."""

    def before_step(self) -> None:
        """The optimizer has all of them."""

    def forget(self) -> None:
        optimizer = self._optimizer
        self._order.forget()
        if optimizer.cpu_offload:
            optimizer.micro_step_id = self._initial
            optimizer.norm_for_param_grads = {}
            optimizer._offload_accumulated_param_ids.clear()  # noqa: SLF001 - nowhere else


class _Of32Bits:
    """With weights of 16 bits and gradients of 32 stage 1 reduces those of all parameters in its own order.

    But the norm is of those only that the rank itself has computed, by which each rank would clip another way.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def after_backward(self) -> None:
        """There is nothing left."""

    def before_step(self) -> None:
        for computed in self._optimizer.fp32_groups_has_gradients:
            computed[:] = [True] * len(computed)

    def forget(self) -> None:
        """The optimizer has cleared them."""


class _OfStage3:
    """Stage 3 adds up gradients in a buffer for each parameter, which the first backward pass of a step overwrites.

    But it does so only for the parameters that it uses, and only the last pass sends a gradient to an optimizer on the
    CPU.
    """

    def __init__(self, optimizer: Any, *, sends_in_step: bool) -> None:
        self._optimizer = optimizer
        self._sends_in_step = sends_in_step
        self._may_be_filled = set(self._buffers)  # by ids of parameters; a checkpoint may bring gradients
        self._used: set[int] = set()
        self._partition = optimizer.partition_grads
        optimizer.partition_grads = self._partition_and_note

    def _partition_and_note(self, parameters: Sequence[Any], *arguments: Any, **options: Any) -> Any:
        self._used.update(parameter.ds_id for parameter in parameters)
        return self._partition(parameters, *arguments, **options)

    def after_backward(self) -> None:
        if self._optimizer.micro_step_id == 0:
            for number in self._may_be_filled - self._used:
                self._buffers[number].zero_()
            self._may_be_filled = set()
        self._may_be_filled |= self._used
        self._used.clear()

    def before_step(self) -> None:
        if not self._optimizer.offload_optimizer:
            return
        gradients: dict[int, list[Tensor]] = {}
        offsets: dict[int, list[int]] = {}
        for parameter in self._not_sent():
            self._optimizer._offload_grad_partition_at_boundary(  # noqa: SLF001 - what the last backward pass does
                parameter, self._buffers[parameter.ds_id], gradients, offsets
            )
        self._optimizer._swap_out_offload_fp32_gradients(gradients, offsets)  # noqa: SLF001 - the same

    def _not_sent(self) -> Iterator[Any]:
        optimizer = self._optimizer
        sent = optimizer._offload_boundary_param_ids if self._sends_in_step else optimizer.norm_for_param_grads  # noqa: SLF001 - which the step looks up
        return (parameter for group in optimizer.fp16_groups for parameter in group if parameter.ds_id not in sent)

    def forget(self) -> None:
        if self._optimizer.offload_optimizer:
            self._optimizer.norm_for_param_grads = {}
            self._optimizer._offload_boundary_param_ids.clear()  # noqa: SLF001 - nowhere else

    @property
    def _buffers(self) -> dict[int, Tensor]:
        buffers: dict[int, Tensor] = getattr(self._optimizer, _BUFFERS)
        return buffers
