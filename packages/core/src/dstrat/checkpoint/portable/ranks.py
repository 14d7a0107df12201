"""The ranks of a job while they save a checkpoint together: what they tell each other, and how they fail together."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from datetime import timedelta

_LONGEST_MESSAGE = 4000


class Ranks:
    """One process alone; what it tells others it hears itself."""

    rank = 0
    size = 1

    def exchange(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, on each of them."""
        return [message]

    def gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks on rank 0, and nothing on the others."""
        return [message]

    def tell(self, message: bytes) -> bytes:
        """Return the message of rank 0, on each rank; those of the others are not looked at."""
        return message

    def close(self) -> None:
        """Free what the talking needed."""

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """Run a block on every rank; where it fails on one it fails on all.

        Args:
            doing: What the block does, after "could not".

        Raises:
            CheckpointError: It failed somewhere; the message names the first rank that failed.
        """
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:  # noqa: BLE001 - raised again below, when the others know
            failure = error
        told = self.exchange(b"" if failure is None else _described(failure))
        if failure is not None and not isinstance(failure, Exception):
            raise failure
        if self.size == 1 and isinstance(failure, CheckpointError):
            raise failure
        for rank, message in enumerate(told):
            if message:
                who = f"rank {rank} could not" if self.size > 1 else "could not"
                raise CheckpointError(f"{who} {doing}: {message.decode(errors='replace')}") from failure


class GroupRanks(Ranks):
    """The ranks of a job, over a process group of their own that works on the CPU and in any thread.

    Args:
        timeout: How long a rank waits for the others.
    """

    def __init__(self, timeout: timedelta) -> None:
        # Its own group, because a save in the background must not come between the collectives of the training.
        self._group: Any = dist.new_group(backend="gloo", timeout=timeout)
        self._parent = dist.group.WORLD
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    @property
    def is_current(self) -> bool:
        """Whether the job's process group is still the one that this group came from."""
        return dist.is_initialized() and dist.group.WORLD is self._parent

    def exchange(self, message: bytes) -> list[bytes]:
        with _losses():
            sizes = self._sizes(message)
            gathered = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes]
            if max(sizes):
                dist.all_gather(gathered, _padded(message, max(sizes)), group=self._group)
        return _cut(gathered, sizes)

    def gather(self, message: bytes) -> list[bytes]:
        with _losses():
            sizes = self._sizes(message)
            gathered = [torch.empty(max(sizes), dtype=torch.uint8) for _ in sizes] if self.rank == 0 else None
            dist.gather(_padded(message, max(sizes)), gathered, dst=0, group=self._group)
        return _cut(gathered, sizes) if gathered else []

    def tell(self, message: bytes) -> bytes:
        with _losses():
            size = torch.tensor([len(message)])
            dist.broadcast(size, src=0, group=self._group)
            told = _padded(message, int(size)) if self.rank == 0 else torch.empty(int(size), dtype=torch.uint8)
            if int(size):
                dist.broadcast(told, src=0, group=self._group)
        return told.numpy().tobytes()

    def _sizes(self, message: bytes) -> list[int]:
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, torch.tensor([len(message)]), group=self._group)
        return [int(size) for size in sizes]

    def close(self) -> None:
        if self.is_current:
            with contextlib.suppress(RuntimeError):
                dist.destroy_process_group(self._group)


def _described(error: BaseException) -> bytes:
    if isinstance(error, OSError) and error.strerror:
        place = f" ({error.filename!r})" if error.filename else ""
        text = error.strerror.lower() + place
    elif isinstance(error, CheckpointError):
        text = str(error)
    else:
        text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text.encode()[:_LONGEST_MESSAGE]


@contextlib.contextmanager
def _losses() -> Iterator[None]:
    try:
        yield
    except (RuntimeError, ValueError) as error:  # a group that was closed is a wrong value
        raise CheckpointError(
            "another rank was lost while the ranks saved a checkpoint together, so it is not there; "
            f"the ones before are untouched ({str(error).splitlines()[0][:200]})"
        ) from error


def _padded(message: bytes, size: int) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(message.ljust(size, b"\0")), dtype=torch.uint8)
        if size
        else torch.empty(0, dtype=torch.uint8)
    )


def _cut(gathered: list[torch.Tensor], sizes: list[int]) -> list[bytes]:
    return [tensor[:size].numpy().tobytes() for tensor, size in zip(gathered, sizes, strict=True)]
