"""Time of an optimizer step on a machine, by its parts."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.cli.measure.machine import PAGE
from dstrat.errors import RequestError
from dstrat.interfaces.memory import Work

if TYPE_CHECKING:
    from dstrat.cli.measure.machine import Link, Machine
    from dstrat.interfaces.communication import Collective, CommunicationLayout
    from dstrat.interfaces.memory import MemoryLayout, TrainingSize

_BACKWARD = 2 / 3
"""Share of a batch's computation in the backward pass, beside which collectives can go on: two products for each of the
forward pass."""
_RINGS = ("all_reduce", "all_gather", "reduce_scatter", "reduce", "broadcast")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of an optimizer step of a rank.

    Attributes:
        compute: Forward and backward passes.
        communication: Collectives that computation does not hide, and what the strategy does in Python for them.
        idle: Waiting for other ranks, such as in the bubble of a pipeline.
        optimizer: The step of the optimizer.
        offload: Copies between host and device, and the optimizer's step on the host.
    """

    compute: float
    communication: float
    idle: float
    optimizer: float
    offload: float

    @property
    def total(self) -> float:
        """All parts, which follow each other."""
        return self.compute + self.communication + self.idle + self.optimizer + self.offload


def step_time(
    machine: Machine, training: TrainingSize, memory: MemoryLayout, communication: CommunicationLayout
) -> StepTime:
    """Return the time of an optimizer step.

    Args:
        machine: The machine, of which the job may have several.
        training: Sizes of the training on one device.
        memory: What a rank holds.
        communication: What a rank communicates.

    Raises:
        RequestError: The machine has no rate of the dtype, or no link between machines.
    """
    dtype = str(training.precision.compute_dtype).removeprefix("torch.")
    batches = training.accumulate_grad_batches
    compute = batches * work_seconds(machine, _work_of_rank(training, communication), dtype)
    # The first pass of a step leaves gradients, and each further one reads both and writes their sum.
    further_passes = batches * communication.passes - 1
    added = 3 * further_passes * communication.weight_share * training.trainable_parameters
    compute += added / (machine.efficiency * machine.memory_bandwidth)
    stepping = _stepped_share(training, memory) * work_seconds(machine, training.optimizer_work, dtype)
    offloaded = memory.host > 0
    # Of activations, in both directions, beside computation.
    copied = 2 * (training.host(memory) - memory.host) / machine.host_bandwidth
    # Ranks wait for whole passes of others, which are longer by the collectives and hooks in them.
    passes = compute + communication.hooks * (machine.hook_latency or 0.0)
    passes += sum(
        collective_seconds(machine, one, training.ranks_per_machine)
        for one in communication.collectives
        if not one.overlaps
    )
    return StepTime(
        compute=compute,
        communication=_exposed(machine, training, communication, compute),
        idle=passes * communication.idle / (1 - communication.idle),
        optimizer=0.0 if offloaded else stepping,
        # Gradients leave the device, parameters come back, and the host reads and writes what it holds.
        offload=(2 * memory.host + communication.copied_from_host) / machine.host_bandwidth
        + max(0.0, batches * copied - compute),
    )


def _work_of_rank(training: TrainingSize, communication: CommunicationLayout) -> Work:
    """Return a rank's part of the work of a batch, whose weights it reads in each pass."""
    work, ranks = training.work, communication.ranks_per_batch
    # Both passes read a weight, and the backward pass writes its gradient.
    size = 2 * training.parameters + training.trainable_parameters
    itemsizes = training.precision.compute_dtype.itemsize, training.precision.param_dtype.itemsize
    weights = min(work.operands, size * itemsizes[0] // itemsizes[1])
    read = communication.passes * communication.weight_share * weights
    share = 1 / ranks if communication.activation_share is None else communication.activation_share
    return Work(
        flops=work.flops // ranks,
        operands=int(share * (work.operands - weights) + read),
        moved=int(share * work.moved),
        operations=int(communication.operation_share * work.operations),
    )


def _stepped_share(training: TrainingSize, memory: MemoryLayout) -> float:
    """Return the share of the parameters that a rank steps."""
    if training.optimizer_state:
        return min(1.0, memory.optimizer_state / training.optimizer_state)
    # Without state, such as of plain SGD, by gradients; ranks whose gradients are views of buckets have all of them.
    return min(1.0, memory.gradients / training.trainable_parameters) if memory.gradients else 1.0


def work_seconds(machine: Machine, work: Work, dtype: str) -> float:
    """Return the time of work on one device.

    Args:
        machine: The machine.
        work: The work.
        dtype: Dtype of its products.
    """
    bandwidth = machine.efficiency * machine.memory_bandwidth
    hidden = 1.0 if machine.operand_overlap is None else machine.operand_overlap
    operands = work.operands / bandwidth
    products = work.flops / machine.rate(dtype) if work.flops else 0.0
    products = max(products + (1 - hidden) * operands, operands)  # of few samples, these read weights for longer
    return products + work.moved / bandwidth + work.operations * machine.operation_latency


def _exposed(machine: Machine, training: TrainingSize, communication: CommunicationLayout, compute: float) -> float:
    """Return the time of collectives that is not hidden by backward passes, and of what the strategy does for them."""
    exposed = communication.copied / (machine.efficiency * machine.memory_bandwidth)
    exposed += communication.hooks * (machine.hook_latency or 0.0)
    exposed += communication.allocated / PAGE * (machine.page_latency or 0.0)
    in_each_batch = in_last_batch = 0.0
    for collective in communication.collectives:
        seconds = collective_seconds(machine, collective, training.ranks_per_machine)
        if not collective.overlaps:
            exposed += seconds
        elif collective.in_each_batch:
            in_each_batch += seconds
        else:
            in_last_batch += seconds
    backward = _BACKWARD * compute
    beside = min(in_each_batch + min(in_last_batch, backward / training.accumulate_grad_batches), backward)
    return exposed + in_each_batch + in_last_batch - machine.overlap * beside


def collective_seconds(machine: Machine, collective: Collective, ranks_per_machine: int) -> float:
    """Return the time of equal collectives, one after the other.

    Raises:
        RequestError: Their ranks are on several machines, and the description has no link between machines.
    """
    if collective.ranks == 1 or not collective.messages:
        return 0.0
    crosses = collective.crosses_machines(ranks_per_machine)
    link = machine.link(collective.kind, collective.ranks, crosses_machines=crosses)
    if link is None:
        scope, options = ("between", "--num-nodes 2") if crosses else ("in", "as many --devices as the training has")
        raise RequestError(f"machine {machine.name!r} has no link {scope} machines: measure it with {options}")
    if crosses and collective.kind in _RINGS:
        link = _of_all_networks(machine, link, collective, ranks_per_machine)
    # A message to a neighbour takes no longer in a larger group.
    ranks = link.ranks if collective.kind == "send" else collective.ranks
    of_one = link.seconds(collective.sent / collective.messages, ranks)
    return collective.messages * of_one


def _of_all_networks(machine: Machine, link: Link, collective: Collective, ranks_per_machine: int) -> Link:
    """Return the link between machines of a group with several ranks on each: a ring through the network of each.

    A link is measured with one rank on each machine.
    """
    ranks = collective.ranks_on_a_machine(ranks_per_machine)
    inside = machine.link(collective.kind, ranks, crosses_machines=False)
    if ranks < 2 or inside is None:
        return link
    return dataclasses.replace(link, bandwidth=min(inside.bandwidth, ranks * link.bandwidth))
