"""Communication between ranks that save a checkpoint together: messages and errors."""

from __future__ import annotations

import contextlib
import traceback
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from dstrat.errors import CheckpointError
from dstrat.parallel.job import current_job

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

    from dstrat.parallel.job import Channel, Job

_LONGEST_MESSAGE = 4000  # bytes, of each rank to each
_SIZE, _SHORT = 8, 248  # bytes: of a size, and of a message that is sent with its size


class Ranks:
    """A job of one process, and the interface for jobs of several."""

    rank = 0
    size = 1

    @property
    def is_current(self) -> bool:
        """Whether these are still the ranks of the job."""
        return True

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, on each of them."""
        return [message]

    def any_rank(self, *, value: bool) -> bool:
        """Return whether the value is true on any rank."""
        return any(self.exchange(b"1" if value else b""))

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks on rank 0, and an empty list on the others."""
        return [message]

    def broadcast(self, message: bytes) -> bytes:
        """Return the message of rank 0 on each of them; the messages of other ranks are ignored."""
        return message

    sends_to_ranks = False
    """Whether bytes can be sent from one rank to another, by the next three methods."""

    def start_send(self, data: torch.Tensor, target: int) -> Any:
        """Start to send bytes to a rank, which receives them in as many calls, and return what to wait for."""
        raise NotImplementedError

    def wait(self, sends: list[Any]) -> None:
        """Wait until what was started is sent."""

    def receive(self, data: torch.Tensor, source: int) -> None:
        """Receive bytes from a rank, into their memory."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the resources of the communication."""

    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        try:
            yield
        except (RuntimeError, ValueError) as error:  # torch raises ValueError for a group that was destroyed
            problem = "another rank was lost" if self.is_current else "the run of this rank ended"
            raise CheckpointError(
                f"{problem} while the ranks saved a checkpoint together, so it is not there; "
                f"the ones before are untouched ({str(error).splitlines()[0][:200]})"
            ) from error

    @contextlib.contextmanager
    def on_all_ranks(self, doing: str) -> Iterator[None]:
        """Run a block on every rank, and raise on all of them if it raises on one; collective.

        Without it, ranks that succeed would wait in the next collective for the one that failed.

        Args:
            doing: The purpose of the block; completes "could not ..." in the message.

        Raises:
            CheckpointError: The block raised on some rank; the message names the first one.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised again below, after the other ranks have its message
            failure = error
        # Most blocks raise nowhere, and a reduction sends less than an exchange.
        any_failed = failure is not None if self.size == 1 else self.any_rank(value=failure is not None)
        messages = self.exchange(b"" if failure is None else _described(failure)) if any_failed else []
        if failure is not None and not isinstance(failure, Exception):  # KeyboardInterrupt stays one
            raise failure
        # As it is, with its class: there is no rank to name.
        if self.size == 1 and isinstance(failure, CheckpointError):
            raise failure
        for rank, message in enumerate(messages):
            if message:
                who = f"rank {rank} could not" if self.size > 1 else "could not"
                raise CheckpointError(f"{who} {doing}: {message.decode(errors='replace')}") from failure


class GroupRanks(Ranks):
    """The ranks of a job, with a process group of their own that works on the CPU and in any thread.

    Args:
        timeout: How long a rank waits for the others.
    """

    sends_to_ranks = True

    def __init__(self, timeout: timedelta) -> None:
        # A separate group: collectives of a background save must not interleave with those of the training.
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._parent = dist.group.WORLD
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @property
    def is_current(self) -> bool:
        # destroy_process_group() for the default group destroys this one too.
        return self._group is not None and dist.is_initialized() and dist.group.WORLD is self._parent

    @override
    @contextlib.contextmanager
    def _losses(self) -> Iterator[None]:
        if self._group is None:
            raise CheckpointError(
                "another rank was lost before, so that the ranks save no checkpoint together any more"
            )
        try:
            with super()._losses():
                yield
        except CheckpointError as error:
            self.close()  # else a rank that waits for this one, and not for the lost one, would wait for this run's end
            for link in (error, error.__cause__):
                if link is not None:
                    traceback.clear_frames(link.__traceback__)  # which hold the group, and so its connections
            raise

    def exchange(self, message: bytes) -> list[bytes]:
        with self._losses():
            # Collectives need equal shapes: each size with the beginning of its message, which most often is all of
            # it, then messages padded to the longest.
            heads = self._all_gather(len(message).to_bytes(_SIZE, "little") + message[:_SHORT], _SIZE + _SHORT)
            sizes = [int.from_bytes(head[:_SIZE], "little") for head in heads]
            if max(sizes) <= _SHORT:
                return [head[_SIZE : _SIZE + size] for head, size in zip(heads, sizes, strict=True)]
            messages = self._all_gather(message, max(sizes))
        return [padded[:size] for padded, size in zip(messages, sizes, strict=True)]

    def _all_gather(self, message: bytes, size: int) -> list[bytes]:
        gathered = [torch.empty(size, dtype=torch.uint8, device="cpu") for _ in range(self.size)]
        dist.all_gather(gathered, _padded(message, size), group=self._group)
        return [tensor.numpy().tobytes() for tensor in gathered]

    def any_rank(self, *, value: bool) -> bool:
        with self._losses():
            flag = torch.tensor([value], dtype=torch.uint8, device="cpu")
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=self._group)
        return bool(flag)

    def gather(self, message: bytes) -> list[bytes]:
        with self._losses():
            lengths = [torch.zeros(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
            dist.all_gather(lengths, torch.tensor([len(message)], device="cpu"), group=self._group)
            sizes = list(map(int, lengths))
            gathered = [_padded(b"", max(sizes)) for _ in sizes] if self.rank == 0 else None
            dist.gather(_padded(message, max(sizes)), gathered, dst=0, group=self._group)
        if gathered is None:
            return []
        return [padded[:size].numpy().tobytes() for padded, size in zip(gathered, sizes, strict=True)]

    def broadcast(self, message: bytes) -> bytes:
        with self._losses():
            size = torch.tensor([len(message)], device="cpu")
            dist.broadcast(size, src=0, group=self._group)
            received = _padded(message if self.rank == 0 else b"", int(size))
            if int(size):
                dist.broadcast(received, src=0, group=self._group)
        return received.numpy().tobytes()

    def start_send(self, data: torch.Tensor, target: int) -> Any:
        with self._losses():
            return dist.isend(data, target, group=self._group)

    def wait(self, sends: list[Any]) -> None:
        with self._losses():
            for send in sends:
                send.wait()

    def receive(self, data: torch.Tensor, source: int) -> None:
        with self._losses():
            dist.recv(data, source, group=self._group)

    def close(self) -> None:
        is_open, group, self._group = self.is_current, self._group, None
        if is_open:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group(group)


class ChannelRanks(Ranks):
    """The ranks of a job without a process group, over a channel of their own.

    Args:
        job: The job.
        channel: A channel of it.
        rank: The rank of this process.
        size: Number of ranks.
    """

    def __init__(self, job: Job, channel: Channel, rank: int, size: int) -> None:
        self._job, self._channel = job, channel
        self.rank, self.size = rank, size

    @property
    def is_current(self) -> bool:
        return current_job() is self._job

    def exchange(self, message: bytes) -> list[bytes]:
        with self._losses():
            return self._channel.all_gather(message)

    def gather(self, message: bytes) -> list[bytes]:
        messages = self.exchange(message)
        return messages if self.rank == 0 else []

    def broadcast(self, message: bytes) -> bytes:
        return self.exchange(message if self.rank == 0 else b"")[0]


def _described(error: BaseException) -> bytes:
    if isinstance(error, OSError) and error.strerror:
        file = f" ({error.filename!r})" if error.filename else ""
        text = error.strerror.lower() + file
    elif isinstance(error, CheckpointError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    # Without an error in it, which would leave the other ranks waiting for this message.
    return text.encode(errors="replace")[:_LONGEST_MESSAGE]


def _padded(message: bytes, size: int) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
        if size
        else torch.empty(0, dtype=torch.uint8, device="cpu")
    )
