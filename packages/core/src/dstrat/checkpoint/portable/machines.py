"""Machines of a job: which ranks share a memory, and files that are sent from one memory to another."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from dstrat.checkpoint.portable.format import MEBIBYTE
from dstrat.checkpoint.portable.memory_files import memory_dir

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from dstrat.checkpoint.portable.ranks import Ranks

_MESSAGE = 64 * MEBIBYTE  # bytes


class Machines:
    """The ranks of a job, grouped by the memory that they write to; collective.

    Args:
        ranks: The ranks of the job.

    Attributes:
        ranks: The ranks of the job.
        of_ranks: The number of each rank's machine, from 0.
        members: The ranks of each machine, in ascending order.
        current: The number of this rank's machine.
        is_leader: Whether this rank is the first of its machine.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        memories = ranks.exchange(_memory_id().encode())
        numbers = {memory: number for number, memory in enumerate(dict.fromkeys(memories))}
        self.of_ranks = [numbers[memory] for memory in memories]
        self.members: list[list[int]] = [[] for _ in numbers]
        for rank, number in enumerate(self.of_ranks):
            self.members[number].append(rank)
        self.current = self.of_ranks[ranks.rank]
        self.is_leader = self.members[self.current][0] == ranks.rank

    @property
    def count(self) -> int:
        """Number of machines."""
        return len(self.members)

    def next_in_ring(self, rank: int) -> int:
        """Return the rank of the next machine that has a copy of a rank's files."""
        number = self.of_ranks[rank]
        return self.member((number + 1) % self.count, self.members[number].index(rank))

    def member(self, machine: int, position: int) -> int:
        """Return a rank of a machine; any position has one, so that ranks share what one machine sends."""
        members = self.members[machine]
        return members[position % len(members)]


def _memory_id() -> str:
    """Return what two processes have in common only if they write to the same memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = platform.node()
    folder = memory_dir()
    # Containers of one machine have memories of their own, or share one.
    status = folder.stat() if folder.is_dir() else None
    return f"{boot} {folder}" if status is None else f"{boot} {status.st_dev} {status.st_ino}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Transfer:
    """Bytes of a file that one rank sends to another.

    Attributes:
        source: The rank that reads them.
        target: The rank that writes them, to the same position.
        name: Of the file.
        size: Of the file in bytes.
        begin: Position of the first byte.
        end: Position after the last byte.
    """

    source: int
    target: int
    name: str
    size: int
    begin: int
    end: int


def transfer_files(
    ranks: Ranks, transfers: Sequence[Transfer], *, read_from: Path, write_to: Callable[[str], Path]
) -> None:
    """Send parts of files between memories, without another copy of them; collective.

    Args:
        ranks: The ranks of the job.
        transfers: The same ones in the same order on every rank.
        read_from: The folder of the files that this rank sends.
        write_to: Returns the path for a file that this rank receives.

    Raises:
        CheckpointError: A rank failed, or was lost.
    """
    files: dict[tuple[str, bool], Tensor] = {}
    with ranks.on_all_ranks("reserve memory for files of another machine"):
        for transfer in transfers:
            key = (transfer.name, transfer.target == ranks.rank)
            if ranks.rank in (transfer.source, transfer.target) and key not in files:
                path = write_to(transfer.name) if key[1] else read_from / transfer.name
                files[key] = _mapped(path, transfer.size, writes=key[1])
        for transfer in transfers:
            if ranks.rank == transfer.target:
                _reserve(write_to(transfer.name), transfer.begin, transfer.end)
    sends = []
    # Sends do not block, and every rank receives in the same order, so that no two ranks wait for each other.
    for transfer in transfers:
        for begin in range(transfer.begin, transfer.end, _MESSAGE):
            end = min(begin + _MESSAGE, transfer.end)
            if ranks.rank == transfer.source:
                sends.append(ranks.start_send(files[transfer.name, False][begin:end], transfer.target))
            elif ranks.rank == transfer.target:
                ranks.receive(files[transfer.name, True][begin:end], transfer.source)
    ranks.wait(sends)


def _mapped(path: Path, size: int, *, writes: bool) -> Tensor:
    if writes:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(descriptor, size)
        os.close(descriptor)
    return torch.from_file(str(path), shared=writes, size=size, dtype=torch.uint8)


def _reserve(path: Path, begin: int, end: int) -> None:
    # Otherwise a write to memory that is full would end the process by SIGBUS, and not by an error.
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, begin, end - begin)
    finally:
        os.close(descriptor)
