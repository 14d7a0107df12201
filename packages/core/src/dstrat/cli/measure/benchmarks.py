"""Benchmarks of a machine: matrix products, copies and collectives, in all ranks at the same time."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from dstrat.cli.measure.machine import PAGE, Link, Machine
from dstrat.interfaces.communication import Collective
from dstrat.launch.job import usable_processors

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dstrat.interfaces.communication import CollectiveKind
    from dstrat.own_loop.loop import OwnLoop
    from dstrat.parallel.strategy import ParallelStrategy

_KINDS: tuple[CollectiveKind, ...] = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"),
)
_SIZES = tuple(2**power for power in (12, 16, 20, 22, 24))  # bytes of a tensor in collectives
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PRODUCT_SECONDS = 0.02  # least duration of the largest matrix product
_LARGEST_PRODUCT = 8192
_COPIED = 2**26  # bytes
# Products of layers: sizes of their operands, of which no two are alike.
_FLAT_PRODUCTS = ((4096, 256, 1024), (2048, 1024, 128), (256, 2048, 1024), (8192, 128, 512))
_FIRST_RUNS, _RUNS = 2, 6  # the first runs allocate memory and open connections
_RUNS_OF_SMALL, _SMALL = 30, 2**20  # small messages are disturbed more


def measure(loop: OwnLoop, name: str) -> Machine:
    """Return the speed of this rank's machine and of the links between machines; collective.

    Each value is that of the slowest rank, with all ranks at work, without the time in which other programs have the
    processors.

    Args:
        loop: A launched loop with a :class:`ParallelStrategy`.
        name: Name of the machine.
    """
    strategy: Any = loop.strategy
    clock = _Clock(strategy)
    flops = {_name(dtype): rate for dtype in _DTYPES if (rate := _product_rate(clock, dtype)) is not None}
    links = tuple(_measure_links(clock))
    bandwidth = _copy_bandwidth(clock)
    accelerator = strategy.accelerator
    return Machine(
        name=name,
        device=accelerator.get_device_name(clock.device) or f"{os.cpu_count()} processors",
        device_type=clock.device.type,
        devices=clock.ranks_per_machine,
        memory=device_memory(clock.device, clock.ranks_per_machine),
        flops=flops,
        memory_bandwidth=bandwidth,
        operation_latency=_operation_latency(clock),
        hook_latency=_hook_latency(clock),
        page_latency=_page_latency(clock),
        operand_overlap=_operand_overlap(clock, flops.get("float32"), bandwidth),
        host_bandwidth=_host_bandwidth(clock),
        overlap=_overlap(clock),
        links=links,
        host_memory=host_memory(),
        source=f"measured with {strategy.world_size} ranks and torch {torch.__version__}",
    )


class _Clock:
    """Times of functions on the device, of the slowest rank.

    Attributes:
        device: The device of this rank.
        ranks_per_machine: Number of ranks on this machine.
    """

    def __init__(self, strategy: ParallelStrategy) -> None:
        self._strategy = strategy
        self.device = strategy.root_device
        self.ranks_per_machine = len(strategy.parallel_devices)
        # Ranks that are more than processors take turns.
        self._turns = max(1.0, self.ranks_per_machine / usable_processors())

    def seconds(self, function: Callable[[], Any], runs: int = _RUNS) -> float:
        """Return the shortest time of a call, which other programs disturb least; collective."""
        return self._slowest(min(self._times(function, time.perf_counter, runs)))

    def seconds_of_computation(self, function: Callable[[], Any]) -> float:
        """Return the shortest time of a call that waits for no other rank; collective.

        On a CPU with one thread that is the processor's time, which other programs disturb even less.
        """
        if self.device.type != "cpu" or torch.get_num_threads() > 1:
            return self.seconds(function)
        return self._slowest(self._turns * min(self._times(function, time.thread_time)))

    def seconds_with_threads(self, function: Callable[[], Any]) -> float:
        """Return the shortest time of a call on the device, in all threads of this process; collective.

        On CPUs, of which a rank has one, its threads take turns.
        """
        if self.device.type != "cpu":
            return self.seconds(function)
        return self._slowest(self._turns * min(self._times(function, time.process_time)))

    def _times(self, function: Callable[[], Any], read_clock: Callable[[], float], runs: int = _RUNS) -> list[float]:
        times = []
        for _ in range(_FIRST_RUNS + runs):
            self._strategy.barrier()
            self._wait_for_device()
            begin = read_clock()
            function()
            self._wait_for_device()
            times.append(read_clock() - begin)
        return times[_FIRST_RUNS:]

    def _slowest(self, seconds: float) -> float:
        return float(self._strategy.reduce(torch.tensor(seconds, device=self.device), reduce_op="max"))

    def is_supported(self, function: Callable[[], Any]) -> bool:
        """Return whether a function raises no error in any rank; collective."""
        try:
            function()
        except RuntimeError:  # an operation that the device or the backend does not have
            return self._strategy.reduce_boolean_decision(False)
        return self._strategy.reduce_boolean_decision(True)

    def groups(self) -> list[tuple[Literal["machine", "network"], int, dist.ProcessGroup]]:
        """Return groups of this rank: in its machine of 2, 4, 8 ... ranks and all, and one across machines; collective.

        All ranks work in such groups at the same time, as in a training.
        """
        world, local = self._strategy.world_size, self.ranks_per_machine
        sizes = {size for power in range(1, local.bit_length()) if local % (size := 2**power) == 0} | {local}
        result: list[tuple[Literal["machine", "network"], int, dist.ProcessGroup]] = []
        for size in sorted(sizes - {1}):
            ranks = [list(range(first, first + size)) for first in range(0, world, size)]
            result.append(("machine", size, dist.new_subgroups_by_enumeration(ranks)[0]))
        if world > local:
            ranks = [list(range(first, world, local)) for first in range(local)]
            result.append(("network", world // local, dist.new_subgroups_by_enumeration(ranks)[0]))
        return result

    def _wait_for_device(self) -> None:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


# Computation


def _product_rate(clock: _Clock, dtype: torch.dtype) -> float | None:
    """Return operations per second of a matrix product that takes long enough; None if there is none of the dtype."""
    size, seconds = 256, 0.0
    while True:
        matrix = torch.rand(size, size, device=clock.device).to(dtype)
        if not clock.is_supported(lambda matrix=matrix: matrix @ matrix):  # type: ignore[misc]  # of this round
            return None
        seconds = clock.seconds_of_computation(lambda matrix=matrix: matrix @ matrix)  # type: ignore[misc]  # likewise
        if seconds > _PRODUCT_SECONDS or size == _LARGEST_PRODUCT:
            return 2 * size**3 / seconds
        size *= 2


def _operand_overlap(clock: _Clock, rate: float | None, bandwidth: float) -> float | None:
    """Return the share of the time for operands that products hide: all, on most devices; None without a rate.

    Args:
        clock: Times of functions.
        rate: Operations per second of products of float32.
        bandwidth: Bytes per second of the memory.
    """
    if rate is None:
        return None
    operands = late = 0.0
    for rows, inner, columns in _FLAT_PRODUCTS:
        first = torch.rand(rows, inner, device=clock.device)
        second = torch.rand(columns, inner, device=clock.device)
        seconds = clock.seconds_of_computation(lambda: torch.nn.functional.linear(first, second))  # noqa: B023 - of this round
        late += seconds - 2 * rows * inner * columns / rate
        operands += 4 * (rows * inner + columns * inner + rows * columns) / bandwidth
    return min(1.0, max(0.0, 1 - late / operands))


def _copy_bandwidth(clock: _Clock) -> float:
    source = torch.zeros(_COPIED, dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    return 2 * _COPIED / clock.seconds_of_computation(lambda: target.copy_(source))  # read and written


def _operation_latency(clock: _Clock) -> float:
    value, count = torch.zeros(16, device=clock.device), 1000

    def run() -> None:
        for _ in range(count):
            value.add_(1.0)

    return clock.seconds_of_computation(run) / count


def _hook_latency(clock: _Clock) -> float:
    """Return the time that hooks add to both passes of a layer; 0 on devices, which compute meanwhile."""
    if clock.device.type != "cpu":
        return 0.0
    layer, sample, count = torch.nn.Linear(16, 16), torch.ones(1, 16, requires_grad=True), 100

    def run() -> None:
        for _ in range(count):
            layer(sample).sum().backward()

    plain = clock.seconds_of_computation(run)
    layer.register_forward_pre_hook(lambda _layer, _inputs: None)
    layer.register_forward_hook(lambda _layer, _inputs, _output: None)
    layer.register_full_backward_pre_hook(lambda _layer, _gradients: None)
    layer.register_full_backward_hook(lambda _layer, _inputs, _gradients: None)
    return max(0.0, clock.seconds_of_computation(run) - plain) / count


def _page_latency(clock: _Clock) -> float:
    """Return the time that the first write to a page of new memory adds; 0 on devices, whose allocators keep memory."""
    if clock.device.type != "cpu":
        return 0.0
    written = torch.zeros(_COPIED, dtype=torch.uint8)
    again = clock.seconds_of_computation(written.zero_)
    # So much memory at once is always the system's, and goes back to it.
    new = clock.seconds_of_computation(lambda: torch.empty(_COPIED, dtype=torch.uint8).fill_(0))
    return max(0.0, new - again) * PAGE / _COPIED


def _host_bandwidth(clock: _Clock) -> float:
    on_host = torch.zeros(_COPIED, dtype=torch.uint8, pin_memory=clock.device.type != "cpu")
    target = torch.empty_like(on_host, device=clock.device)
    return _COPIED / clock.seconds_of_computation(lambda: target.copy_(on_host, non_blocking=True))


def device_memory(device: torch.device, ranks_per_machine: int) -> int:
    """Return the memory of a device in bytes; for CPUs, a rank's share of the machine's memory."""
    if device.type == "cpu":
        return host_memory() // ranks_per_machine
    module = torch.get_device_module(device)
    if not hasattr(module, "mem_get_info"):  # of Apple's GPUs, which share the memory of the machine
        return int(module.recommended_max_memory())
    return int(module.mem_get_info(device)[1])


def host_memory(process: Path = Path("/proc/self/cgroup"), groups: Path = Path("/sys/fs/cgroup")) -> int:
    """Return the memory of this machine in bytes, or the limit of its container or job if that is less.

    Args:
        process: File with the control group of this process.
        groups: Folder of the control groups, of version 2.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = process.read_text().splitlines() if process.is_file() else ()
    group = groups / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    files = [folder / "memory.max" for folder in (group, *group.parents) if folder.is_relative_to(groups)]
    limits = [file.read_text().strip() for file in files if file.is_file()]
    return min([memory, *(int(limit) for limit in limits if limit.isdecimal())])


# Collectives


@dataclass(frozen=True, slots=True)
class _Call:
    """A collective on a tensor of some bytes, in a group."""

    kind: CollectiveKind
    size: int
    group: dist.ProcessGroup
    device: torch.device

    def function(self) -> Callable[[], Any]:
        """Return a function that runs it, with tensors that exist already."""
        ranks = dist.get_world_size(self.group)
        count = self.size // 4 // ranks * ranks  # elements, a multiple of the ranks
        full = torch.zeros(count, device=self.device)
        shards = list(full.chunk(ranks))
        shard = torch.zeros(count // ranks, device=self.device)
        members = dist.get_process_group_ranks(self.group)
        calls: dict[CollectiveKind, Callable[[], Any]] = {
            "all_reduce": partial(dist.all_reduce, full, group=self.group),
            "all_gather": partial(dist.all_gather, shards, shard, group=self.group),
            "reduce_scatter": partial(dist.reduce_scatter, shard, shards, group=self.group),
            "all_to_all": partial(dist.all_to_all_single, torch.empty_like(full), full, group=self.group),
            "broadcast": partial(dist.broadcast, full, members[0], group=self.group),
            "send": partial(self._send, members, full, torch.empty_like(full)),
        }
        return calls[self.kind]

    def _send(self, members: Sequence[int], sent: torch.Tensor, received: torch.Tensor) -> None:
        """Send to the next rank, and receive from the one before."""
        position = dist.get_group_rank(self.group, dist.get_rank())
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, members[(position + 1) % len(members)], self.group),
                dist.P2POp(dist.irecv, received, members[position - 1], self.group),
            ]
        )
        for work in works:
            work.wait()


def _measure_links(clock: _Clock) -> list[Link]:
    links = []
    for scope, ranks, group in clock.groups():
        for kind in _KINDS:
            calls = [_Call(kind, size, group, clock.device) for size in _SIZES]
            if not clock.is_supported(calls[0].function()):
                continue
            points = [
                (_sent(call, ranks), clock.seconds(call.function(), _RUNS_OF_SMALL if call.size < _SMALL else _RUNS))
                for call in calls
            ]
            latency, bandwidth = fit_link(points)
            links.append(Link(kind=kind, scope=scope, ranks=ranks, latency=latency, bandwidth=bandwidth))
    return links


def _sent(call: _Call, ranks: int) -> float:
    return Collective(kind=call.kind, bytes=call.size, messages=1, ranks=ranks).sent


def fit_link(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Return latency and bandwidth of the line through times of some sizes that has the least relative errors.

    Args:
        points: ``(bytes, seconds)`` of a collective.
    """
    sizes, seconds = (torch.tensor(values, dtype=torch.float64) for values in zip(*points, strict=True))
    rows = torch.stack([1 / seconds, sizes / seconds], dim=1)  # least squares of (latency + size / bandwidth) / seconds
    latency, inverse = torch.linalg.lstsq(rows, torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0].tolist()
    largest, duration = max(points)
    # Other programs may delay small ones, so that the line does not rise.
    rises = inverse * largest > 1e-3 * duration
    return max(latency, 0.0), 1 / inverse if rises else largest / duration


def _overlap(clock: _Clock) -> float:
    """Return the share of an all-reduce that matrix products hide, if both take the same time alone.

    It is less than 0 if both at once take longer than one after the other, as processors and memory are shared.
    """
    if dist.get_world_size() == 1:
        return 0.0
    full = torch.zeros(_SIZES[-1] // 4, device=clock.device)
    matrix = torch.rand(512, 512, device=clock.device)
    alone = clock.seconds(lambda: dist.all_reduce(full))
    count = max(1, round(alone / clock.seconds_of_computation(lambda: matrix @ matrix)))

    def compute() -> None:
        for _ in range(count):
            matrix @ matrix

    def compute_beside() -> None:
        work: Any = dist.all_reduce(full, async_op=True)
        compute()
        work.wait()

    computed = clock.seconds_of_computation(compute)
    # Other programs delay two threads more than they need, unless these share one processor.
    both = min(clock.seconds(compute_beside), max(alone, clock.seconds_with_threads(compute_beside)))
    return overlap_of(alone, computed, both)


def overlap_of(communicated: float, computed: float, both: float) -> float:
    """Return the share that is hidden of the shorter of a collective and a computation, from -1 to 1.

    Args:
        communicated: Seconds of the collective alone.
        computed: Seconds of the computation alone.
        both: Seconds of both at the same time.
    """
    return min(1.0, max(-1.0, (communicated + computed - both) / min(communicated, computed)))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
