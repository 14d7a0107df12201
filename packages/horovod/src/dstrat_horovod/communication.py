"""Horovod's communication among the ranks of a job: start, collectives, end."""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import pickle
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import ClusterError, PeerError, RequestError
from dstrat.parallel.collectives import name_of_operation, pack_object, stored_elements
from dstrat_horovod.internals import Rendezvous, slot_environment

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from datetime import timedelta

    from torch import Tensor
    from torch.distributed import Store

    from dstrat.interfaces.cluster import ClusterEnvironment

BUILD_COMMAND = (
    "HOROVOD_WITH_PYTORCH=1 HOROVOD_WITH_GLOO=1 pip install --no-build-isolation --no-binary=horovod horovod==0.28.1"
)
"""The command that compiles Horovod; today's torch needs C++17 too, see the README."""

_ADDRESS, _PORT = "HOROVOD_GLOO_RENDEZVOUS_ADDR", "HOROVOD_GLOO_RENDEZVOUS_PORT"
_KEY, _FAILURE = "horovod rendezvous", "horovod failure"
_FAILING_SECONDS = 1.0  # in which every rank that waited has noticed the end of Horovod

_WIDER = {  # dtypes that Horovod cannot reduce
    torch.bfloat16: torch.float32,
    **dict.fromkeys((torch.bool, torch.uint8, torch.int8, torch.int16), torch.int32),
}


def horovod() -> Any:
    """Return ``horovod.torch``.

    Raises:
        RequestError: It was built without torch, for another version of it, or without Gloo.
    """
    try:
        hvd = importlib.import_module("horovod.torch")
    except Exception as error:
        raise RequestError(
            f"strategy 'horovod' cannot load horovod.torch ({str(error).strip().splitlines()[-1]}): compile Horovod "
            f"for torch {torch.__version__}: {BUILD_COMMAND}"
        ) from error
    if not hvd.gloo_built():
        raise RequestError(
            "strategy 'horovod' needs Horovod with Gloo, which connects the ranks, and this one was built without: "
            f"{BUILD_COMMAND}"
        )
    return hvd


class Communication:
    """Horovod, initialized with the ranks of a job.

    Horovod that the user has initialized is used as it is, and stays open.

    Args:
        cluster: The cluster environment, with the address of rank 0 and the rank of this process.
        num_local: Number of ranks on each machine.
        store: The store of the job, through which the ranks get the address of the rendezvous.
        timeout: How long a collective waits for the other ranks.

    Raises:
        ClusterError: Horovod is initialized already with another size or rank.
        PeerError: Another rank did not come, or has ended.
    """

    def __init__(self, cluster: ClusterEnvironment, num_local: int, store: Store, timeout: timedelta) -> None:
        self.hvd = horovod()
        self.timeout = timeout
        self._rank, self._size = cluster.global_rank, cluster.world_size
        self._store = store
        self._watch = _WaitWatch(self.hvd, timeout.total_seconds())
        self._rendezvous: Rendezvous | None = None
        self._num_channels = 0
        self.num_begun = 0  # collectives
        self._starts = not self.hvd.is_initialized()
        if self._starts:
            self._start(cluster, num_local, store)
        existing = (self.hvd.rank(), self.hvd.size())
        if existing != (self._rank, self._size):
            raise ClusterError(
                f"Horovod is initialized already, as rank {existing[0]} of {existing[1]}, and this is rank "
                f"{self._rank} of {self._size}: leave hvd.init() to the strategy, or start the script with horovodrun"
            )

    def _start(self, cluster: ClusterEnvironment, num_local: int, store: Store) -> None:
        environ = {}
        if "HOROVOD_GLOO_TIMEOUT_SECONDS" not in os.environ:
            environ["HOROVOD_GLOO_TIMEOUT_SECONDS"] = str(max(1, math.ceil(self.timeout.total_seconds())))
        if not self._is_slot_of_horovodrun():
            slots = [slot_environment(rank, self._size, num_local) for rank in range(self._size)]
            environ |= slots[self._rank]
            environ |= {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo"}
            if num_local == self._size:  # on one machine nothing has to leave the loopback
                environ["HOROVOD_GLOO_IFACE"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
            if self._rank == 0:
                self._rendezvous = Rendezvous(cluster.main_address, [*slots])
                store.set(_KEY, f"{cluster.main_address} {self._rendezvous.port}")
            environ[_ADDRESS], environ[_PORT] = store.get(_KEY).decode().split(" ")
        # Horovod reads them while it starts; later they would describe children of this process as ranks.
        with _environment(environ), self.peer_errors("the start of Horovod"):
            self.hvd.init()

    def _is_slot_of_horovodrun(self) -> bool:
        """Return whether horovodrun serves a rendezvous for this rank, and not for a program that started it."""
        slot = (os.environ.get("HOROVOD_RANK"), os.environ.get("HOROVOD_SIZE"))
        return _ADDRESS in os.environ and slot == (str(self._rank), str(self._size))

    def close(self, *, aborts: bool) -> None:
        """End what this object has started; if the job breaks, end Horovod, so that no rank waits for this one."""
        self._watch.close()
        if self._starts or aborts:  # Horovod that the user has started stays open, unless peers would wait in it
            self.hvd.shutdown()
        if self._rendezvous is not None:
            self._rendezvous.close()
            self._rendezvous = None

    # Collectives.  A name is used again and again, as Horovod caches what ranks have agreed on by it.

    def reduce(self, tensor: Tensor, reduce_op: Any = "mean", process_set: Any = None) -> Tensor:
        """Return the tensor reduced over the ranks; a mean of integers is a float.

        Raises:
            RequestError: Horovod has no such operation.
        """
        name = name_of_operation(reduce_op)
        # A mean is divided below, so that one of integers is a float.
        operations = {"sum": "Sum", "mean": "Sum", "max": "Max", "min": "Min", "product": "Product"}
        if name not in operations:
            raise RequestError(f"reduce_op {reduce_op!r} is not one of avg, {', '.join(operations)}, which Horovod has")
        wide = _WIDER.get(tensor.dtype, tensor.dtype)
        group = self.hvd.global_process_set if process_set is None else process_set
        with self.peer_errors(name):
            handle = self.hvd.allreduce_async(
                tensor.detach().to(wide).contiguous(),
                name=f"dstrat.{name}.{wide}.{tensor.dim()}",
                op=getattr(self.hvd, operations[name]),
                process_set=group,
            )
            reduced: Tensor = self.hvd.synchronize(handle)
        if name == "mean":
            reduced = reduced / group.size()
            return reduced.to(tensor.dtype) if tensor.is_floating_point() else reduced
        return reduced.to(tensor.dtype)

    def all_gather(self, tensor: Tensor, process_set: Any = None, *, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all ranks stacked along a new first dimension."""
        if tensor.dtype is torch.bfloat16:  # which float32 holds exactly
            return self.all_gather(tensor.float(), process_set, sync_grads=sync_grads).to(tensor.dtype)
        if sync_grads and torch.is_grad_enabled():
            with_gradient: Tensor = _GatherWithGradients.apply(tensor, self, process_set)  # type: ignore[no-untyped-call]
            return with_gradient
        group = self.hvd.global_process_set if process_set is None else process_set
        rows = tensor.detach().contiguous().unsqueeze(0)
        with self.peer_errors("all_gather"):
            gathered: Tensor = self.hvd.allgather(rows, name=f"dstrat.all_gather.{tensor.dtype}", process_set=group)
        return gathered

    def all_gather_bytes(self, message: bytes, name: str) -> list[bytes]:
        """Return the messages of all ranks, by rank."""
        with self.peer_errors("all_gather"):
            sizes = self.hvd.allgather(torch.tensor([len(message)]), name=f"{name}.sizes").tolist()
            # torch refuses an empty buffer.
            values = torch.frombuffer(bytearray(message or b"\0"), dtype=torch.uint8)[: len(message)]
            gathered = self.hvd.allgather(values, name=f"{name}.values").numpy().tobytes()
        ends = [sum(sizes[: rank + 1]) for rank in range(self._size)]
        return [gathered[end - size : end] for end, size in zip(ends, sizes, strict=True)]

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of the source rank, which must be picklable."""
        is_source = self._rank == src
        # As bytes, so that tensors of a device do not bring its index along.
        message = pack_object(obj) if is_source else None
        with self.peer_errors("broadcast"):
            message = self.hvd.broadcast_object(message, root_rank=src, name="dstrat.broadcast")
        return obj if is_source else pickle.loads(message)  # noqa: S301 - from a rank of the job

    def barrier(self, name: str | None) -> None:
        """Wait until all ranks have called this."""
        with self.peer_errors(name or "barrier"):
            self.hvd.barrier()

    def broadcast_tensors(self, tensors: Iterable[Tensor]) -> None:
        """Overwrite tensors, of any dtype, by those of global rank 0."""
        targets = [stored_elements(tensor.detach()) for tensor in tensors if not tensor.is_meta and tensor.numel()]
        values = [target.contiguous() for target in targets]  # the tensor itself, unless it is strided
        with self.peer_errors("broadcast"):
            # Bytes, as Horovod lacks some dtypes; a view, so that it writes into the tensor.
            as_bytes = [value.reshape(-1).view(torch.uint8) for value in values]
            self.hvd.broadcast_parameters([(str(index), value) for index, value in enumerate(as_bytes)], root_rank=0)
        for target, value in zip(targets, values, strict=True):
            if value is not target:
                target.copy_(value)

    def open_channel(self) -> MessageChannel:
        """Return a channel for messages, which other threads may use while this one communicates."""
        self._num_channels += 1
        return MessageChannel(self, f"dstrat.channel.{self._num_channels}")

    @contextlib.contextmanager
    def peer_errors(self, collective: str) -> Iterator[None]:
        """Turn errors of Horovod within a ``with`` block into a PeerError, and end the wait after the timeout.

        Args:
            collective: Its name, for the message.
        """
        self.num_begun += 1
        self._watch.begin()
        try:
            with self.lost_peers(collective):
                yield
        finally:
            self._watch.end()

    @contextlib.contextmanager
    def lost_peers(self, collective: str) -> Iterator[None]:
        """Turn errors of Horovod within a ``with`` block that does not wait into a PeerError.

        Args:
            collective: Name of the collective that the block begins, for the message.
        """
        try:
            yield
        except (RuntimeError, ValueError) as error:
            is_of_horovod = "Horovod" in f"{type(error).__name__} {error}" or "gloo" in str(error).lower()
            if not (is_of_horovod or self._watch.has_fired):
                raise
            raise self._peer_error(collective, str(error).strip().partition("\n")[0]) from error

    def _peer_error(self, collective: str, reason: str) -> PeerError:
        timed_out = self._watch.has_fired
        with contextlib.suppress(RuntimeError):  # rank 0, which serves the store, may have ended
            self._store.set(f"failed in a collective {self._rank}", "")
        if not timed_out:
            cause = self._failure_of_peer()
            return PeerError(f"lost the connection to other ranks in {collective!r} ({cause or reason})")
        missing = ", ".join(map(str, self._ranks_without_failure()))
        return PeerError(
            f"timed out waiting for rank {missing or '?'} of {self._size} in {collective!r}, which did not come within "
            f"{self.timeout.total_seconds():g} s ({reason})",
            timed_out=True,
        )

    def record_failure(self, error: BaseException) -> None:
        """Record why this rank fails, for its peers, before they lose the connection to it.

        horovodrun ends all ranks when the first one has ended, which may be a peer that only lost the connection.
        """
        if not isinstance(error, PeerError):
            with contextlib.suppress(RuntimeError):
                self._store.set(_FAILURE, f"rank {self._rank} of {self._size} failed: {type(error).__name__}: {error}")

    def _failure_of_peer(self) -> str:
        """Return what another rank has recorded as its failure; empty if none has."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([_FAILURE]):
                return str(self._store.get(_FAILURE).decode())
        return ""

    def _ranks_without_failure(self) -> list[int]:
        """Return the ranks that did not wait in a collective when Horovod was ended."""
        time.sleep(_FAILING_SECONDS)
        ranks = [rank for rank in range(self._size) if rank != self._rank]
        with contextlib.suppress(RuntimeError):
            return [rank for rank in ranks if not self._store.check([f"failed in a collective {rank}"])]
        return []


class _WaitWatch(threading.Thread):
    """Thread that ends Horovod when a collective of this rank has waited for too long.

    Horovod's stall check did not end a job over Gloo.

    Args:
        hvd: The module ``horovod.torch``.
        seconds: The longest wait.
    """

    def __init__(self, hvd: Any, seconds: float) -> None:
        super().__init__(name="horovod-wait-watch", daemon=True)
        self._hvd, self._seconds = hvd, seconds
        self._began: dict[int, float] = {}  # by thread: a save in the background communicates too
        self._closed = threading.Event()
        self.has_fired = False
        self.start()

    def begin(self) -> None:
        """Note that a collective begins."""
        self._began[threading.get_ident()] = time.monotonic()

    def end(self) -> None:
        """Note that it has ended."""
        self._began.pop(threading.get_ident(), None)

    def close(self) -> None:
        """End the thread, which Horovod's end may still keep."""
        self._closed.set()

    def run(self) -> None:
        while not self._closed.wait(min(1.0, self._seconds / 4)):
            began = min(tuple(self._began.values()), default=None)
            if began is not None and time.monotonic() - began > self._seconds:
                self.has_fired = True
                self._hvd.shutdown()  # all pending collectives fail, in every rank that waits
                return


class _GatherWithGradients(torch.autograd.Function):
    """Gathers in the forward pass; in the backward pass each rank gets the sum of the gradients of its tensor.

    Horovod's ``allgather`` gives their average.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, communication: Communication, process_set: Any) -> Tensor:
        ctx.communication, ctx.process_set = communication, process_set
        return communication.all_gather(tensor, process_set)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        summed = ctx.communication.reduce(gradient, "sum", ctx.process_set)
        hvd = ctx.communication.hvd
        return summed[hvd.rank() if ctx.process_set is None else ctx.process_set.rank()], None, None


class MessageChannel:
    """Messages among all ranks under a name of their own; see :class:`dstrat.parallel.process_group.Channel`.

    Args:
        communication: The open communication.
        name: The same in every rank.
    """

    def __init__(self, communication: Communication, name: str) -> None:
        self._communication, self._name = communication, name

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank, on each of them; collective."""
        return self._communication.all_gather_bytes(message, self._name)


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables within a ``with`` block."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
