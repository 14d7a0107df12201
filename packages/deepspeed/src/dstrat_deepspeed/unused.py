"""Gradients of parameters that not every batch uses, which stages 1 to 3 else leave as they were, or leave out."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

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
        return _OfStages1And2(optimizer, sends_in_step=sends_in_step)
    return None


class _OfStages1And2:
    """Stage 1 reduces in the last backward pass of a step, and then only the parameters that this pass has used.

    An optimizer on the CPU keeps the gradients of parameters that a step does not use, and misses those that its last
    pass does not use.
    """

    def __init__(self, optimizer: Any, *, sends_in_step: bool) -> None:
        self._optimizer = optimizer
        self._sends_in_step = sends_in_step
        self._initial = optimizer.micro_step_id
        self._reducing: set[int] = set()
        if optimizer.overlap_comm and not optimizer.partition_gradients:
            self._reduce_one, self._reduce_rest = (
                optimizer.reduce_independent_p_g_buckets_and_remove_grads,
                optimizer.reduce_gradients,
            )
            optimizer.reduce_independent_p_g_buckets_and_remove_grads = self._reduce_and_note
            optimizer.reduce_gradients = self._reduce_all

    def _reduce_and_note(self, parameter: Any, group: int) -> None:
        self._reducing.add(id(parameter))
        self._reduce_one(parameter, group)

    def _reduce_all(self, *arguments: Any, **options: Any) -> None:
        for number, group in enumerate(self._optimizer.bit16_groups):
            for parameter in group:
                is_left = id(parameter) not in self._reducing
                if is_left and self._optimizer.get_gradient_for_reduction(parameter) is not None:
                    self._reduce_one(parameter, number)
        self._reducing.clear()
        self._reduce_rest(*arguments, **options)

    def after_backward(self) -> None:
        optimizer = self._optimizer
        if optimizer.cpu_offload and optimizer.micro_step_id == self._initial + 1:
            for number in optimizer.accumulated_grads_in_cpu.keys() - self._accumulated:
                optimizer.accumulated_grads_in_cpu[number].zero_()

    def before_step(self) -> None:
        optimizer = self._optimizer
        if not optimizer.cpu_offload:
            return
        sent = self._accumulated
        if not self._sends_in_step:
            self._accumulated.difference_update(optimizer.norm_for_param_grads)
            optimizer._finalize_cpu_offload_gradient_accumulation()  # noqa: SLF001 - as it does where it sends in the step
            sent = optimizer.norm_for_param_grads.keys()
        for group, parameters in enumerate(optimizer.params_in_partition):
            for number in {optimizer.get_param_id(parameter) for parameter in parameters} - sent:
                _, _, offset, length = optimizer.grad_position[number]
                optimizer.single_partition_of_fp32_groups[group].grad.view(-1).narrow(0, offset, length).zero_()

    def forget(self) -> None:
        if self._optimizer.cpu_offload:
            self._optimizer.micro_step_id = self._initial
            self._optimizer.norm_for_param_grads = {}
            self._accumulated.clear()

    @property
    def _accumulated(self) -> set[int]:
        """The ids of parameters that batches of the step have used."""
        accumulated: set[int] = self._optimizer._offload_accumulated_param_ids  # noqa: SLF001 - nowhere else
        return accumulated


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
