"""Checkpoint io of the portable format, with the memory that stages a save in the background."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from typing_extensions import override

from dstrat.checkpoint.paths import place
from dstrat.checkpoint.portable.format import BUCKET
from dstrat.checkpoint.portable.ranks import GroupRanks, Ranks
from dstrat.checkpoint.portable.shards import LocalBox, Payload, as_bytes
from dstrat.checkpoint.portable.storage import map_in_threads
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.parallel.process_group import group_timeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from datetime import timedelta
    from pathlib import Path

    from torch import Tensor

    from dstrat.checkpoint.portable.reader import CheckpointReader
    from dstrat.checkpoint.portable.save import Prepared, ShardFile


class PortableCheckpointIO(CheckpointIO):
    """A directory that any strategy on any number of ranks can load.

    Saving is collective: every rank calls it with nested values.  A plain tensor is the same on every rank and is
    written by one of them; a ``DTensor`` is written by the ranks that hold its shards; other values are rank 0's; what
    is under the key ``"per_rank"`` each rank keeps for itself; a text under ``"saved_with"`` is in the manifest too.
    Loading is not collective.  A path may be a URL of a store that fsspec reaches, such as ``s3://bucket/folder``.  The
    format is described in ``docs/checkpoint-format.md``.

    Args:
        verify: Whether checksums are compared while loading.
        timeout: How long a rank waits for the others while they save; None is as long as in the strategy's collectives.
    """

    is_collective = True

    def __init__(self, verify: bool = True, timeout: timedelta | None = None) -> None:
        self.verify, self.timeout = verify, timeout
        self._ranks: Ranks | None = None
        self._memory = StagingMemory()

    @override
    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path) -> None:
        """Write the checkpoint; collective.

        Raises:
            CheckpointError: It failed on some rank; then there is nothing under the path.
        """
        self.write(self._prepare(checkpoint), path)

    def stage(self, checkpoint: Mapping[str, Any]) -> Prepared:
        """Copy what this rank is going to write to the host; collective.

        Raises:
            CheckpointError: Something in it cannot be saved, on whichever rank.
        """
        prepared = self._prepare(checkpoint)
        with prepared.ranks.together("copy its tensors"):
            return dataclasses.replace(prepared, shard=self._memory.copy(prepared.shard))

    def write(self, staged: Prepared, path: str | Path) -> None:
        """Write what was staged; collective, in any thread.

        Raises:
            CheckpointError: It failed on some rank; then there is nothing under the path.
        """
        from dstrat.checkpoint.portable.newest import point_to
        from dstrat.checkpoint.portable.save import write

        target = place(path)
        write(staged, target)
        with staged.ranks.together("point to the newest checkpoint"):
            if staged.ranks.rank == 0:
                point_to(target)

    def _prepare(self, checkpoint: Mapping[str, Any]) -> Prepared:
        from dstrat.checkpoint.portable.save import prepare

        return prepare(checkpoint, self._current_ranks())

    @override
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint with whole tensors; ``"per_rank"`` is there where as many ranks saved it."""
        from dstrat.checkpoint.portable.load import load

        rank, world_size = self._place()
        with self._open(path) as folder:
            return load(folder, rank=rank, world_size=world_size)

    @override
    def load_into(self, path: str | Path, template: Mapping[str, Any]) -> dict[str, Any]:
        """Fill the template's tensors, whatever their placements, and return the checkpoint with them in it.

        Tensors that the template lacks are returned whole; below a place where it has None none is read.

        Raises:
            CheckpointError: It is damaged, lacks a tensor of the template, or has it in another shape or dtype.
        """
        from dstrat.checkpoint.portable.load import load_into

        rank, world_size = self._place()
        with self._open(path) as folder:
            return load_into(folder, template, rank=rank, world_size=world_size)

    @override
    def load_rank(self, path: str | Path, rank: int) -> dict[str, Any]:
        from dstrat.checkpoint.portable.load import load_rank_values

        with self._open(path) as folder:
            values: dict[str, Any] = load_rank_values(folder, rank)
            return values

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, if it is there."""
        from dstrat.checkpoint.portable.newest import forget
        from dstrat.checkpoint.portable.storage import storage_of

        folder = place(path)
        if folder.is_dir():
            storage_of(folder).remove_checkpoint(folder)
            forget(folder)

    def _open(self, path: str | Path) -> CheckpointReader:
        from dstrat.checkpoint.portable.newest import resolved
        from dstrat.checkpoint.portable.reader import CheckpointReader

        return CheckpointReader(resolved(place(path)), verifies=self.verify)

    @override
    def teardown(self) -> None:
        self._memory.release()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def _current_ranks(self) -> Ranks:
        """Return the ranks of the job that there is now."""
        if isinstance(self._ranks, GroupRanks) and not self._ranks.is_current:
            self._ranks = None
        if self._ranks is None:
            self._ranks = GroupRanks(self.timeout or group_timeout()) if self._place()[1] > 1 else Ranks()
        return self._ranks

    @staticmethod
    def _place() -> tuple[int, int]:
        """Return rank and world size."""
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        return 0, 1


# The copy of what is to be written, taken while the training stands still, in memory that is used again.


class StagingMemory:
    """Memory of the host for one copy at a time; pinned where the tensors are on an accelerator that gains by it.

    It is kept, because taking memory from the system costs more than copying.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, shard: ShardFile) -> ShardFile:
        """Return the same file with its payloads copied; the copies before are gone."""
        devices = {payload.tensor.device for payload in shard.payloads}
        is_pinned = any(device.type == "cuda" for device in devices)
        self._reserve(shard.size, is_pinned=is_pinned)
        copies, moves, reached = [], [], 0
        for payload in shard.payloads:  # in descending size of elements, so each is aligned
            target = self._memory[reached : reached + payload.num_bytes].view(payload.dtype).view(payload.shape)
            reached += payload.num_bytes
            copies.append(Payload(payload.name, LocalBox(tensor=target, starts=payload.starts)))
            moves += list(_moves(payload.tensor, target))
        map_in_threads(_move, moves)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return replace(shard, payloads=copies)

    def release(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, size: int, *, is_pinned: bool) -> None:
        if self._memory.numel() < size or (is_pinned and not self._memory.is_pinned()):
            self.release()
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)


def _moves(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the copy in buckets, so that the threads share the large tensors."""
    if not source.is_contiguous() or source.is_conj() or source.is_neg() or not source.is_cpu:
        yield source, target
        return
    one, other = as_bytes(source), as_bytes(target)
    for begin in range(0, one.numel(), BUCKET):
        yield one[begin : begin + BUCKET], other[begin : begin + BUCKET]


def _move(pair: tuple[Tensor, Tensor]) -> None:
    source, target = pair
    with torch.no_grad():
        target.copy_(source, non_blocking=True)
