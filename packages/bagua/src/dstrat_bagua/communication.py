"""Groups of ranks, a thread for exchanges beside the backward pass, and averages over all ranks."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dstrat.errors import PeerError, RequestError
from dstrat.parallel.collectives import uses_host_memory
from dstrat.parallel.internals import new_connections
from dstrat.parallel.process_group import wait_for_all_ranks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from datetime import timedelta

    from torch import Tensor

_SECONDS_AFTER_TIMEOUT = 10.0  # in which the collective reports by itself, with a better message
_SECONDS_TO_END = 5.0  # for a thread that waits for a rank that has failed


class Ranks:
    """Process groups of an algorithm, beside that of the job, whose order of collectives they do not disturb.

    With ``hierarchical`` the ranks of each machine average first, then the first ranks of the machines run the
    algorithm, and each sends the result to its machine.  Opening the groups is collective.

    Args:
        node_rank: Rank of this machine.
        hierarchical: Whether machines are the units of the exchange, instead of ranks.
        timeout: How long a collective waits.

    Attributes:
        group: The ranks that run the algorithm; None on a rank that leaves it to the first one of its machine.
        size: Number of these ranks.
        rank: Index of this rank among them.

    Raises:
        RequestError: Machines have different numbers of ranks, and ``hierarchical`` is set.
    """

    def __init__(self, node_rank: int, *, hierarchical: bool, timeout: timedelta) -> None:
        node_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(node_ranks, node_rank)
        machines = [[rank for rank, node in enumerate(node_ranks) if node == one] for one in sorted(set(node_ranks))]
        self._machine: dist.ProcessGroup | None = None
        self._machine_size, self._first = 1, 0
        if hierarchical and len(machines) < len(node_ranks):
            if len({len(ranks) for ranks in machines}) > 1:
                sizes = ", ".join(str(len(ranks)) for ranks in machines)
                raise RequestError(
                    f"hierarchical=True needs as many ranks on each machine, and they have {sizes}: set "
                    "hierarchical=False in the strategy's constructor, or use as many devices on each"
                )
            with new_connections():
                self._machine, _ = dist.new_subgroups_by_enumeration(machines, timeout=timeout)
            [ranks] = [ranks for ranks in machines if dist.get_rank() in ranks]
            self._machine_size, self._first = len(ranks), ranks[0]
            members = [ranks[0] for ranks in machines]
        else:
            members = [*range(len(node_ranks))]
        # By all ranks, also by those that are not in it, as torch requires.
        with new_connections():
            group = dist.new_group(members, timeout=timeout)
        wait_for_all_ranks("open the groups of an algorithm")
        is_member = dist.get_rank() in members
        self.group = group if is_member else None
        self.size = len(members)
        self.rank = members.index(dist.get_rank()) if is_member else -1
        self.members = members

    def run(self, exchange: Callable[[Tensor], None], flat: Tensor) -> None:
        """Run an exchange, which changes a tensor in place, between ranks or machines; it blocks.

        Args:
            exchange: Called where this rank takes part and is not alone.
            flat: Changed in place.
        """
        if self._machine is not None:
            dist.reduce(flat, dst=self._first, group=self._machine)
            flat.div_(self._machine_size)
        if self.group is not None and self.size > 1:
            exchange(flat)
        if self._machine is not None:
            dist.broadcast(flat, src=self._first, group=self._machine)

    def average(self, values: Tensor) -> None:
        """Replace a tensor by its average over the ranks that run the algorithm, as an exchange of :meth:`run`."""
        dist.all_reduce(values, group=self.group)
        values.div_(self.size)  # not ReduceOp.AVG, which Gloo lacks

    def exchange(self, values: Tensor, peers: Iterable[int]) -> dict[int, Tensor]:
        """Send a tensor to other ranks that run the algorithm, and return what each of them sends; it blocks.

        Args:
            values: A tensor of the same shape and dtype on all of them.
            peers: Their ranks in the job.
        """
        sent = values.cpu() if uses_host_memory() else values  # gloo sends from the memory of the host only
        received = {peer: torch.empty_like(sent) for peer in peers}
        operations = [dist.P2POp(dist.isend, sent, peer, self.group) for peer in received]
        operations += [dist.P2POp(dist.irecv, buffer, peer, self.group) for peer, buffer in received.items()]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return {peer: buffer.to(values.device) for peer, buffer in received.items()}

    def release(self) -> None:
        """Drop the groups, which end with that of the job."""
        # The last reference must not be this one: torch would wait for the group's threads while it holds the GIL.
        self.group = self._machine = None


class Exchange:
    """Exchange that a thread runs.

    Args:
        timeout: How long :meth:`wait` waits.
        stream: Stream of the device on which the thread works; None on the CPU.
    """

    def __init__(self, timeout: timedelta, stream: Any) -> None:
        self.done: Future[None] = Future()
        self.finished: Any = None  # event of the device
        self._timeout, self._stream = timeout, stream

    def wait(self) -> None:
        """Wait until the exchange has finished; on a GPU, until its work is queued before that of this thread.

        Raises:
            PeerError: Other ranks did not take part.
        """
        seconds = self._timeout.total_seconds() + _SECONDS_AFTER_TIMEOUT
        done, _ = wait([self.done], timeout=seconds)  # not result(timeout), whose TimeoutError may be the exchange's
        if not done:
            raise PeerError(
                f"timed out waiting for the exchange of the other ranks, after {seconds:g} s", timed_out=True
            )
        self.done.result()
        if self.finished is not None:
            self.finished.wait()  # the stream of this thread waits, and the host goes on


class CommunicationThread:
    """Thread that runs exchanges in the order in which they were submitted, which is the same on all ranks.

    Args:
        device: Device of the tensors.
        timeout: How long an exchange may take.
    """

    def __init__(self, device: torch.device, timeout: timedelta) -> None:
        self._device, self._timeout = device, timeout
        # A stream of its own: on that of the training, exchanges and the backward pass would wait for each other.
        self._runtime = None if device.type == "cpu" else torch.get_device_module(device)
        self._stream = None if self._runtime is None else self._runtime.Stream(device)
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        # A daemon, because a collective of which a rank has died may never return.
        self._thread = threading.Thread(target=self._run, name="dstrat-bagua", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., None], *args: Any) -> Exchange:
        """Queue a call; on a GPU it begins after the work that is queued now."""
        exchange = Exchange(self._timeout, self._stream)
        ready = None
        if self._runtime is not None:
            ready = self._runtime.Event()
            ready.record()
        self._queue.put((exchange, ready, function, args))
        return exchange

    def close(self) -> None:
        """End the thread; one that waits for a failed rank ends with the process."""
        has_backlog = not self._queue.empty()  # of an aborted training: the thread waits in a collective
        self._queue.put(None)
        self._thread.join(0 if has_backlog else _SECONDS_TO_END)

    def _run(self) -> None:
        while (call := self._queue.get()) is not None:
            exchange, ready, function, args = call
            try:
                if self._runtime is None:
                    function(*args)
                else:
                    with self._runtime.device(self._device), self._runtime.stream(self._stream):
                        ready.wait()
                        function(*args)
                        exchange.finished = self._runtime.Event()
                        exchange.finished.record()
            except BaseException as error:  # noqa: BLE001 - raised where the result is waited for
                exchange.done.set_exception(error)
            else:
                exchange.done.set_result(None)
            del call, exchange, function, args  # tensors that this thread would hold until the next call


# Averages over all ranks, for evaluation and checkpoints


@torch.no_grad()
def average_tensors(tensors: Sequence[Tensor]) -> None:
    """Replace floating-point tensors by their averages over all ranks; collective.

    Args:
        tensors: Of the same shapes and dtypes on all ranks.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for members in by_dtype.values():  # one collective each, as most tensors are small
        flat = torch.cat([tensor.reshape(-1) for tensor in members])
        dist.all_reduce(flat)
        flat.div_(dist.get_world_size())
        for tensor, values in zip(members, flat.split([tensor.numel() for tensor in members]), strict=True):
            tensor.copy_(values.view(tensor.shape))
