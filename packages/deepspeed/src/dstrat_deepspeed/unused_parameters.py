"""Gradients of unused parameters: the same order of reductions on all ranks, and zeros."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import distributed

from dstrat.errors import MisuseError
from dstrat_deepspeed import internals

if TYPE_CHECKING:
    from collections.abc import Hashable, Iterable, Iterator, Sequence


def is_same_on_all_ranks(values: Hashable, group: Any, device: torch.device) -> bool:
    """Return whether all ranks of a group have equal values; collective, with two numbers.

    Values are numbers, and tuples of them: hashes of other types may differ between processes.
    """
    # The maximum of a number and of its negative give the largest and the least: equal if all are.
    number = hash(values) % 2**62
    bounds = torch.tensor([number, -number], device=device)
    distributed.all_reduce(bounds, distributed.ReduceOp.MAX, group=group)
    largest, negated_least = bounds.tolist()
    return bool(largest == -negated_least)


class GradientOrder:
    """A common order in which the ranks of stages 1 and 2 reduce gradients, even if they use different parameters.

    DeepSpeed fills a bucket with gradients in the order in which a rank computes them, and reduces it over the ranks:
    ranks with another order would add gradients of different parameters.  Here a gradient that comes too early is
    deferred, and one that a rank has not computed by the end of a backward pass is zero, as in stage 0.  The order is
    that of the first pass, or of rank 0's if ranks differ in it, so that nothing is deferred if all passes are equal.
    Ranks compare their orders in the first pass only, once per bucket.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._parameters = {
            optimizer.get_param_id(parameter): (parameter, group)
            for group, parameters in enumerate(optimizer.bit16_groups)
            for parameter in parameters
        }
        self._device: torch.device = next(iter(self._parameters.values()))[0].device
        self._order: list[int] = []
        self._positions: dict[int, int] = {}
        self._is_complete = False
        self._has_differed = False
        self._waits_for_end = False
        self._pending: dict[int, Any] = {}  # deferred gradients, each with the CUDA event after which it can be read
        self._num_pending_elements = 0
        self._num_sent = 0
        self._send = optimizer.reduce_independent_p_g_buckets_and_remove_grads
        self._end = optimizer.overlapping_partition_gradients_reduce_epilogue
        optimizer.reduce_independent_p_g_buckets_and_remove_grads = self._on_gradient
        optimizer.overlapping_partition_gradients_reduce_epilogue = self._end_pass

    def forget(self) -> None:
        """Drop gradients that an interrupted backward pass has deferred; those in buckets cannot be taken back."""
        self._pending.clear()
        self._num_pending_elements = self._num_sent = 0

    def _on_gradient(self, parameter: Any, _group: int) -> None:
        if not getattr(parameter, "ds_grad_is_ready", True):
            return  # a part of a gradient: the parameter comes again with the sum
        number = self._optimizer.get_param_id(parameter)
        if self._positions.get(number, self._num_sent) < self._num_sent:
            raise MisuseError(
                f"{self._optimizer.param_names[parameter]} has got gradients several times in one backward pass, and "
                "the ranks have averaged the first ones already: compute them by self.manual_backward(loss) alone, and "
                "checkpoint activations of shared layers with use_reentrant=False, or pass a reduce_bucket_size "
                "(elements) that holds all gradients"
            )
        # A shared layer's gradient may come several times in a pass, and only the last one is complete.
        self._waits_for_end |= number in self._pending
        self._pending[number] = None
        if self._is_complete:
            if not self._waits_for_end:
                self._send_in_turn()
        elif not self._has_differed:
            self._num_pending_elements += parameter.numel()
            if self._num_pending_elements > self._optimizer.reduce_bucket_size:
                self._compare_order(is_end=False)
        if number in self._pending:
            self._pending[number] = _record_event()

    def _send_in_turn(self) -> None:
        while self._num_sent < len(self._order) and self._order[self._num_sent] in self._pending:
            self._send_next()

    def _send_next(self) -> None:
        number = self._order[self._num_sent]
        parameter, group = self._parameters[number]
        if not self._optimizer.ready_for_gradients:
            # No gradient was computed in this pass: they are from a checkpoint, or zero.
            self._optimizer.setup_buckets()
        _wait_for(self._pending.pop(number, None), self._optimizer.get_gradient_for_reduction(parameter))
        self._num_sent += 1
        self._send(parameter, group)

    def _end_pass(self) -> None:
        if not self._is_complete:
            self._complete_order()
        while self._num_sent < len(self._order):
            self._set_zeros(self._parameters[self._order[self._num_sent]][0])
            self._send_next()
        self._num_sent = 0
        self._end()

    def _set_zeros(self, parameter: Any) -> None:
        optimizer = self._optimizer
        if optimizer.get_gradient_for_reduction(parameter) is not None:
            return  # stage 1 keeps gradients until the step: this one is from the pass, or an earlier one
        if optimizer.use_grad_accum_attribute:
            dtype = optimizer.gradient_accumulation_dtype
            parameter.grad_accum = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        else:
            parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def _compare_order(self, *, is_end: bool) -> None:
        """Append the pending gradients to the order if all ranks have the same; otherwise defer them to the pass's end.

        Collective; the first difference ends the comparisons.
        """
        group = self._optimizer.dp_process_group
        self._has_differed = not is_same_on_all_ranks((is_end, *self._pending), group, self._device)
        if not self._has_differed:
            self._append(self._pending)
            self._num_pending_elements = 0
            self._send_in_turn()

    def _complete_order(self) -> None:
        if not self._has_differed:
            self._compare_order(is_end=True)
        group, numbers = self._optimizer.dp_process_group, dict.fromkeys([*self._pending, *self._parameters])
        missing = [number for number in numbers if number not in self._positions]
        order_of_rank_0 = torch.tensor(missing, dtype=torch.int64, device=self._device)
        distributed.broadcast(order_of_rank_0, distributed.get_global_rank(group, 0), group=group)
        self._append(order_of_rank_0.tolist())
        self._is_complete = True

    def _append(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._positions[number] = len(self._order)
            self._order.append(number)


def _record_event() -> Any:
    """Record an event on the current stream of a GPU; return None on a CPU."""
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    if accelerator.resolves_data_dependency():
        return None
    event = accelerator.Event()
    event.record(accelerator.current_stream())
    return event


def _wait_for(event: Any, gradient: Any) -> None:
    """Make the current stream wait for an event before it uses a gradient."""
    if event is not None:
        stream = import_module("deepspeed.accelerator").get_accelerator().current_stream()
        stream.wait_event(event)
        gradient.record_stream(stream)  # or the allocator may reuse its memory while the stream still reads it


# Parameters that not every batch of a step uses


class UnusedGradients:
    """Completion of gradients between the batches of a step, for parameters that not every batch uses.

    This base class does nothing; its subclasses do what a wrapper of DeepSpeed's leaves out.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def after_backward(self) -> None:
        """Clear gradients of the previous step, after the first backward pass of this one."""

    def before_step(self) -> None:
        """Pass gradients to the optimizer that the last backward pass did not compute."""

    def forget(self) -> None:
        """Reset the state, so that the next backward pass is the first one of a step."""


def unused_gradients(optimizer: Any, *, sends_in_step: bool) -> UnusedGradients:
    """Return the completion of gradients for DeepSpeed's wrapper of an optimizer.

    Args:
        optimizer: The wrapper.
        sends_in_step: Whether gradients are sent to an optimizer on the CPU in the step, not in the last backward pass.
    """
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        return _Stage3Gradients(optimizer, sends_in_step=sends_in_step)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _Stages1And2Gradients(optimizer)
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        return _Float32Gradients(optimizer)
    return UnusedGradients(optimizer)  # stage 0 needs none


class _Stages1And2Gradients(UnusedGradients):
    """Gradients of stages 1 and 2, which :class:`GradientOrder` completes in each pass that reduces them."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._initial = optimizer.micro_step_id
        self._order = GradientOrder(optimizer)

    def forget(self) -> None:
        self._order.forget()
        if self._optimizer.cpu_offload:
            self._optimizer.micro_step_id = self._initial
            internals.forget_offloaded_gradients(self._optimizer)


class _Float32Gradients(UnusedGradients):
    """Gradients of stage 1 with weights of 16 bits and gradients of 32 bits, which reduces all of them in one order."""

    def before_step(self) -> None:
        # The norm skips gradients that this rank has not computed, so that each rank would clip by another norm.
        for computed in self._optimizer.fp32_groups_has_gradients:
            computed[:] = [True] * len(computed)


class _Stage3Gradients(UnusedGradients):
    """Gradients of stage 3, which are accumulated in a buffer for each parameter.

    The first backward pass of a step overwrites the buffers, but only of the parameters that it uses: others still have
    the gradients of an earlier step.  And only the last pass sends gradients to an optimizer on the CPU, again only of
    the parameters that it uses.  A parameter whose gradients come in several parts of a pass, each of which would
    overwrite the one before, is an error.
    """

    def __init__(self, optimizer: Any, *, sends_in_step: bool) -> None:
        super().__init__(optimizer)
        self._sends_in_step = sends_in_step
        self._may_be_filled = set(internals.gradient_buffers(optimizer))  # a checkpoint may bring gradients
        self._used: set[int] = set()
        self._arrived: set[int] = set()  # in this backward pass
        self._pass = optimizer.micro_step_id
        self._partition = optimizer.partition_grads
        self._reduce = optimizer.reduce_independent_p_g_buckets_and_remove_grads
        optimizer.partition_grads = self._partition_and_record
        optimizer.reduce_independent_p_g_buckets_and_remove_grads = self._check_and_reduce

    def _check_and_reduce(self, parameter: Any) -> None:
        if not getattr(parameter, "ds_grad_is_ready", True):
            self._reduce(parameter)  # a part of a gradient: the parameter comes again with the sum
            return
        if self._pass != self._optimizer.micro_step_id:
            self._pass = self._optimizer.micro_step_id
            self._arrived.clear()
        if parameter.ds_id in self._arrived:
            raise MisuseError(
                f"{self._optimizer.param_names[parameter]} has got gradients several times in one backward pass, and "
                "stage 3 keeps the last ones alone: checkpoint activations of shared layers with use_reentrant=False"
            )
        self._arrived.add(parameter.ds_id)
        self._reduce(parameter)

    def _partition_and_record(self, parameters: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        self._used.update(parameter.ds_id for parameter in parameters)
        return self._partition(parameters, *args, **kwargs)

    def after_backward(self) -> None:
        self._arrived.clear()
        if self._optimizer.micro_step_id == 0:
            buffers = internals.gradient_buffers(self._optimizer)
            for number in self._may_be_filled - self._used:
                buffers[number].zero_()
            self._may_be_filled = set()
        self._may_be_filled |= self._used
        self._used.clear()

    def before_step(self) -> None:
        self._arrived.clear()
        if self._optimizer.offload_optimizer:
            internals.offload_gradients(self._optimizer, self._not_sent())

    def _not_sent(self) -> Iterator[Any]:
        sent = internals.offloaded_ids(self._optimizer, in_step=self._sends_in_step)
        parameters = (parameter for group in self._optimizer.fp16_groups for parameter in group)
        return (parameter for parameter in parameters if parameter.ds_id not in sent)

    def forget(self) -> None:
        self._arrived.clear()
        if self._optimizer.offload_optimizer:
            internals.forget_offloaded_gradients(self._optimizer)
