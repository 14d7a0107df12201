"""Gradients of parameters that a rank or a batch does not use: one order of reductions, and zeros for them."""

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

    Args:
        values: Numbers, and tuples of them, whose hash is the same in each process.
        group: Of torch.distributed.
        device: Where its collectives work.
    """
    number = hash(values) % 2**62
    bounds = torch.tensor([number, -number], device=device)
    distributed.all_reduce(bounds, distributed.ReduceOp.MAX, group=group)
    largest, negated_least = bounds.tolist()
    return bool(largest == -negated_least)


class GradientOrder:
    """One order in which ranks of stages 1 and 2 reduce gradients, whatever parameters each of them uses.

    DeepSpeed fills its buckets with gradients as a rank computes them, and adds up buckets over the ranks.  Here a
    gradient that comes before its turn waits for it, and one that a rank has not computed by the end of a backward pass
    is zero, as in stage 0.  The order is that of the first pass, of rank 0 where ranks differ in it, so that nothing
    waits where all passes are alike.  Ranks compare their orders in the first pass only, once for each bucket.

    Args:
        optimizer: DeepSpeed's wrapper of the user's optimizer.
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
        self._waiting: dict[int, Any] = {}  # each with the event on a GPU after which it can be read
        self._elements_waiting = 0
        self._num_sent = 0
        self._send = optimizer.reduce_independent_p_g_buckets_and_remove_grads
        self._end = optimizer.overlapping_partition_gradients_reduce_epilogue
        optimizer.reduce_independent_p_g_buckets_and_remove_grads = self._receive
        optimizer.overlapping_partition_gradients_reduce_epilogue = self._end_pass

    def forget(self) -> None:
        """Drop the gradients that still wait after an interrupted backward pass; what was sent cannot be undone."""
        self._waiting.clear()
        self._elements_waiting = self._num_sent = 0

    def _receive(self, parameter: Any, group: int) -> None:  # noqa: ARG002 - as DeepSpeed passes it
        if not getattr(parameter, "ds_grad_is_ready", True):
            return  # more is added to it, and it comes again
        number = self._optimizer.get_param_id(parameter)
        if self._positions.get(number, self._num_sent) < self._num_sent:
            raise MisuseError(
                f"{self._optimizer.param_names[parameter]} has got gradients several times in one backward pass, and "
                "the ranks have averaged the first ones already: compute them by self.manual_backward(loss) alone, and "
                "checkpoint activations of shared layers with use_reentrant=False, or pass a reduce_bucket_size "
                "(elements) that holds all gradients"
            )
        self._waits_for_end |= number in self._waiting  # for the second time in a pass
        self._waiting[number] = None
        if self._is_complete:
            if not self._waits_for_end:
                self._send_in_turn()
        elif not self._has_differed:
            self._elements_waiting += parameter.numel()
            if self._elements_waiting > self._optimizer.reduce_bucket_size:
                self._agree(is_end=False)
        if number in self._waiting:
            self._waiting[number] = _record_event()

    def _send_in_turn(self) -> None:
        while self._num_sent < len(self._order) and self._order[self._num_sent] in self._waiting:
            self._send_next()

    def _send_next(self) -> None:
        number = self._order[self._num_sent]
        parameter, group = self._parameters[number]
        if not self._optimizer.ready_for_gradients:
            self._optimizer.setup_buckets()  # as nothing was computed: gradients came from a checkpoint, or are zero
        _wait_for(self._waiting.pop(number, None), self._optimizer.get_gradient_for_reduction(parameter))
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
            return  # stage 1 has it from this pass, or an earlier one
        if optimizer.use_grad_accum_attribute:
            dtype = optimizer.gradient_accumulation_dtype
            parameter.grad_accum = torch.zeros(parameter.shape, dtype=dtype, device=parameter.device)
        else:
            parameter.grad = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)

    def _agree(self, *, is_end: bool) -> None:
        """Send what waits if all ranks have computed the same until now; else let it wait for the end of the pass."""
        group = self._optimizer.dp_process_group
        self._has_differed = not is_same_on_all_ranks((is_end, *self._waiting), group, self._device)
        if not self._has_differed:
            self._append(self._waiting)
            self._elements_waiting = 0
            self._send_in_turn()

    def _complete_order(self) -> None:
        if not self._has_differed:
            self._agree(is_end=True)
        group, numbers = self._optimizer.dp_process_group, dict.fromkeys([*self._waiting, *self._parameters])
        rest = torch.tensor([n for n in numbers if n not in self._positions], dtype=torch.int64, device=self._device)
        distributed.broadcast(rest, distributed.get_global_rank(group, 0), group=group)
        self._append(rest.tolist())
        self._is_complete = True

    def _append(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._positions[number] = len(self._order)
            self._order.append(number)


def _record_event() -> Any:
    """Return an event after what has been begun on this stream of a GPU; None on a CPU."""
    accelerator = import_module("deepspeed.accelerator").get_accelerator()
    if accelerator.resolves_data_dependency():
        return None
    event = accelerator.Event()
    event.record(accelerator.current_stream())
    return event


def _wait_for(event: Any, gradient: Any) -> None:
    """Let the current stream use a gradient after an event."""
    if event is not None:
        stream = import_module("deepspeed.accelerator").get_accelerator().current_stream()
        stream.wait_event(event)
        gradient.record_stream(stream)  # or its memory is used again while the stream still reads it


# Gradients that no batch of a step has computed


class UnusedGradients:
    """Zeros for gradients that no batch of a step has computed, and what the last batch of a step leaves undone.

    This class is for optimizers that leave nothing undone.

    Args:
        optimizer: DeepSpeed's wrapper of the user's optimizer.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer

    def after_backward(self) -> None:
        """Clear gradients from before the first backward pass of a step."""

    def before_step(self) -> None:
        """Let the optimizer have the gradients that the last backward pass has not brought."""

    def forget(self) -> None:
        """Let the next backward pass be the first one of a step."""


def unused_gradients(optimizer: Any, *, sends_in_step: bool) -> UnusedGradients | None:
    """Return the handling of unused parameters; None where DeepSpeed needs none, as in stage 0.

    Args:
        optimizer: DeepSpeed's wrapper of the user's optimizer.
        sends_in_step: Whether DeepSpeed sends gradients to an optimizer on the CPU in the step.
    """
    if hasattr(optimizer, "grad_partitions_flat_buffer"):
        return _OfStage3(optimizer, sends_in_step=sends_in_step)
    if hasattr(optimizer, "single_partition_of_fp32_groups"):
        return _OfStages1And2(optimizer)
    if hasattr(optimizer, "fp32_groups_has_gradients"):
        return _Of32Bits(optimizer)
    return None


class _OfStages1And2(UnusedGradients):
    """Passes after which gradients are reduced bring those of all parameters, so that nothing else is missing."""

    def __init__(self, optimizer: Any) -> None:
        super().__init__(optimizer)
        self._initial = optimizer.micro_step_id
        self._order = GradientOrder(optimizer)

    def forget(self) -> None:
        self._order.forget()
        if self._optimizer.cpu_offload:
            self._optimizer.micro_step_id = self._initial
            internals.forget_offloaded_gradients(self._optimizer)


class _Of32Bits(UnusedGradients):
    """With weights of 16 bits and gradients of 32 stage 1 reduces those of all parameters in its own order.

    But the norm is of those only that the rank itself has computed, by which each rank would clip another way.
    """

    def before_step(self) -> None:
        for computed in self._optimizer.fp32_groups_has_gradients:
            computed[:] = [True] * len(computed)


class _OfStage3(UnusedGradients):
    """Stage 3 adds up gradients in a buffer for each parameter, which the first backward pass of a step overwrites.

    But it does so only for the parameters that it uses, and only the last pass sends a gradient to an optimizer on the
    CPU.
    """

    def __init__(self, optimizer: Any, *, sends_in_step: bool) -> None:
        super().__init__(optimizer)
        self._sends_in_step = sends_in_step
        self._may_be_filled = set(internals.gradient_buffers(optimizer))  # a checkpoint may bring gradients
        self._used: set[int] = set()
        self._partition = optimizer.partition_grads
        optimizer.partition_grads = self._partition_and_note

    def _partition_and_note(self, parameters: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        self._used.update(parameter.ds_id for parameter in parameters)
        return self._partition(parameters, *args, **kwargs)

    def after_backward(self) -> None:
        if self._optimizer.micro_step_id == 0:
            buffers = internals.gradient_buffers(self._optimizer)
            for number in self._may_be_filled - self._used:
                buffers[number].zero_()
            self._may_be_filled = set()
        self._may_be_filled |= self._used
        self._used.clear()

    def before_step(self) -> None:
        if self._optimizer.offload_optimizer:
            internals.offload_gradients(self._optimizer, self._not_sent())

    def _not_sent(self) -> Iterator[Any]:
        sent = internals.offloaded_ids(self._optimizer, in_step=self._sends_in_step)
        parameters = (parameter for group in self._optimizer.fp16_groups for parameter in group)
        return (parameter for parameter in parameters if parameter.ds_id not in sent)

    def forget(self) -> None:
        if self._optimizer.offload_optimizer:
            internals.forget_offloaded_gradients(self._optimizer)
