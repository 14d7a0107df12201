"""Checkpoint io of the portable format, with the staging memory of background saves."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from typing_extensions import override

from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.format import BUCKET
from dstrat.checkpoint.portable.machines import Machines
from dstrat.checkpoint.portable.payload import Payload, as_bytes, host_memory, wait_for_devices
from dstrat.checkpoint.portable.ranks import ChannelRanks, GroupRanks, Ranks
from dstrat.checkpoint.portable.storage import MemoryStorage, map_in_threads, storage_of
from dstrat.errors import CheckpointError, StoreError
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.parallel.internals import empty_host_cache
from dstrat.parallel.job import current_job, rank_and_size
from dstrat.parallel.process_group import DEFAULT_TIMEOUT
from dstrat.parallel.shards import LocalBox

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence
    from datetime import timedelta

    from torch import Tensor

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.checkpoint.portable.reader import CheckpointReader
    from dstrat.checkpoint.portable.save import Prepared, ShardFile
    from dstrat.checkpoint.portable.storage import Storage

_log = logging.getLogger(__name__)


class PortableCheckpointIO(CheckpointIO):
    """Checkpoints in folders that any strategy on any number of ranks can load.

    Saving is collective: every rank passes nested values.  A plain tensor is equal on every rank, and one of them
    writes it; a ``DTensor`` is written by the ranks that hold its shards; other values are rank 0's.  The values under
    ``"per_rank"`` are saved for each rank.  A str under ``"saved_with"`` is in the manifest too.  Loading is not
    collective.  A path may be a URL of a store that fsspec supports, such as ``s3://bucket/folder``.
    ``docs/checkpoint-format.md`` describes the format.

    Args:
        verify: Whether loading verifies checksums.
        timeout: How long a rank waits for the others while they save; None is the timeout of the process group.
    """

    is_collective = True

    def __init__(self, verify: bool = True, timeout: timedelta | None = None) -> None:
        self.verify, self.timeout = verify, timeout
        self._ranks: Ranks | None = None
        self._machines: Machines | None = None
        self._memory = StagingMemory()
        self._moves_existing: set[str] = set()
        self._written: set[str] = set()

    def move_existing(self, path: str | Path) -> None:
        """Let the next save at a path move what is there beside it, on a disk; called by every rank before that save.

        What this process has saved there itself is removed, as if the new checkpoint had replaced it.
        """
        self._moves_existing.add(str(path))

    @override
    def check_values(self, values: Mapping[str, Any]) -> None:
        from dstrat.checkpoint.portable.encode import encode

        encode(values)

    @override
    def save_checkpoint(self, checkpoint: Mapping[str, Any], path: str | Path) -> None:
        """Write a checkpoint; collective.

        Raises:
            CheckpointError: A rank failed; then all ranks raise, and nothing is at the path.
        """
        self.write(self._prepare(checkpoint), path)

    def stage(self, checkpoint: Mapping[str, Any]) -> Prepared:
        """Copy the tensors that this rank writes to host memory; collective.

        Raises:
            CheckpointError: A value cannot be saved, on any rank.
        """
        prepared = self._prepare(checkpoint)
        with prepared.ranks.on_all_ranks("copy its tensors"):
            return dataclasses.replace(prepared, shard=self._memory.copy(prepared.shard))

    def write(self, staged: Prepared, path: str | Path) -> None:
        """Write a staged checkpoint; collective, in any thread.

        Raises:
            CheckpointError: A rank failed; then all ranks raise, and nothing is at the path.
        """
        # Here, as in other methods: a process that only saves need not import what loads, nor the other way round.
        from dstrat.checkpoint.portable.save import write

        target = as_path(path)
        storage = storage_of(target)
        if isinstance(target, Path) and isinstance(storage, MemoryStorage):
            machines = self.machines(staged.ranks)
            if machines.count > 1:
                from dstrat.checkpoint.portable.mirrored import write_mirrored

                write_mirrored(staged, target, machines)
                return
        moves_existing = str(path) in self._moves_existing
        self._moves_existing.discard(str(path))
        write(staged, target, storage, moves_existing=moves_existing, after_move=self._after_move)
        self._written.add(str(target.absolute()))

    def _after_move(self, target: CheckpointPath, moved_to: Path, storage: Storage[Any]) -> None:
        """Remove what was at the path of a new checkpoint if this process has saved it; else log its new path."""
        if str(target.absolute()) in self._written:
            storage.remove_checkpoint(moved_to)
            return
        _log.warning(
            "%s is the new checkpoint: what was there before, and was not saved by this process, is %s now",
            target,
            moved_to,
        )

    def _prepare(self, checkpoint: Mapping[str, Any]) -> Prepared:
        from dstrat.checkpoint.portable.save import prepare

        prepared = prepare(checkpoint, self.ranks())
        # Threads read the tensors, on streams that do not wait for the one on which the last step was queued.
        wait_for_devices(prepared.shard.devices)
        return prepared

    @override
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Return the checkpoint with full tensors, and ``"per_rank"`` if as many ranks saved it."""
        from dstrat.checkpoint.portable.load import load

        rank, world_size = rank_and_size()
        with self._open(path) as folder:
            return load(folder, rank=rank, world_size=world_size)

    @override
    def load_into(self, path: str | Path, template: Mapping[str, Any]) -> dict[str, Any]:
        """Read into the template's tensors, of any placements, and return the checkpoint with them in it.

        Tensors that the template lacks are returned in full; below a None of the template no tensor is read.

        Raises:
            CheckpointError: The checkpoint is damaged, lacks a tensor of the template, or has it in another shape or
                dtype.
        """
        from dstrat.checkpoint.portable.load import load_into

        rank, world_size = rank_and_size()
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
        """Remove a checkpoint, if it exists; the pointer beside it then names another one."""
        from dstrat.checkpoint.portable.newest import forget

        folder = as_path(path)
        if folder.is_dir():
            storage_of(folder).remove_checkpoint(folder)
            forget(folder)

    def _open(self, path: str | Path) -> CheckpointReader:
        from dstrat.checkpoint.portable.newest import resolve
        from dstrat.checkpoint.portable.reader import CheckpointReader

        try:
            return CheckpointReader(resolve(as_path(path)), verifies=self.verify)
        except OSError as error:
            if isinstance(error, CheckpointError):
                raise
            # Of a folder without access, or a name that is too long: pathlib raises these while it looks for the path.
            raise StoreError(
                f"checkpoint {str(path)!r} cannot be read: {(error.strerror or str(error)).lower()}"
            ) from error

    @override
    def teardown(self) -> None:
        self._memory.release()
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = self._machines = None

    def machines(self, ranks: Ranks) -> Machines:
        """Return the machines of the ranks; collective on the first call in a job."""
        if self._machines is None or self._machines.ranks is not ranks:
            self._machines = Machines(ranks)
        return self._machines

    def ranks(self) -> Ranks:
        """Return the ranks of the current job; another fit opens another process group or channel."""
        if self._ranks is None or not self._ranks.is_current:
            (rank, size), job = rank_and_size(), current_job()
            if size == 1:
                self._ranks = Ranks()
            elif job is not None and job.open_channel is not None:
                self._ranks = ChannelRanks(job, job.open_channel(), rank, size)
            else:  # a process group of the user's may be open without a job
                self._ranks = GroupRanks(self.timeout or (DEFAULT_TIMEOUT if job is None else job.timeout))
        return self._ranks


# Host memory for the copy of a background save, reused from save to save


_CHUNK = 2**30  # bytes


class StagingMemory:
    """Host memory for one staged save at a time, pinned if the tensors are on a device.

    It consists of chunks: torch rounds the size of pinned memory up to a power of two, which would nearly double one
    large buffer.
    """

    # It is reused, since allocating (and pinning) memory takes longer than the copy itself.

    def __init__(self) -> None:
        self._chunks: list[Tensor] = []
        self._pins = False

    def copy(self, shard: ShardFile) -> ShardFile:
        """Return the same file with copies of its payloads; these overwrite the copies of the previous call."""
        groups = _groups(shard.payloads)
        self._reserve(groups, pins=any(device.type != "cpu" for device in shard.devices))
        copies, moves = [], []
        for chunk, payloads in zip(self._chunks, groups, strict=False):  # of an earlier save there may be more chunks
            reached = 0
            for payload in payloads:  # ordered by descending element size, so each view is aligned
                target = chunk[reached : reached + payload.num_bytes].view(payload.dtype).view(payload.shape)
                reached += payload.num_bytes
                copies.append(Payload(payload.name, LocalBox(tensor=target, starts=payload.starts)))
                moves += list(_moves(payload.tensor, target))
        map_in_threads(_move_all, list(_batches(moves)))
        # Copies to pinned memory are in flight, and the next step changes the tensors.
        wait_for_devices(shard.devices)
        return dataclasses.replace(shard, payloads=copies)

    def release(self) -> None:
        """Free the memory."""
        self._chunks = []
        if self._pins:
            empty_host_cache()  # otherwise torch would keep the memory locked for itself
        self._pins = False

    def _reserve(self, groups: Sequence[Sequence[Payload]], *, pins: bool) -> None:
        sizes = [sum(payload.num_bytes for payload in group) for group in groups]
        fits = len(sizes) <= len(self._chunks) and all(
            size <= chunk.numel() for size, chunk in zip(sizes, self._chunks, strict=False)
        )
        if not fits or (pins and not self._pins):
            self.release()  # before the allocation, or both would exist at a time
            self._pins = pins
            self._chunks = [host_memory(size, pins=pins) for size in sizes]


def _groups(payloads: Sequence[Payload]) -> list[list[Payload]]:
    """Return consecutive groups of payloads, each as large as a chunk, or of one larger payload."""
    groups: list[list[Payload]] = []
    free = 0
    for payload in payloads:
        if payload.num_bytes > free or not groups:
            groups.append([])
            free = _CHUNK
        groups[-1].append(payload)
        free -= payload.num_bytes
    return groups


def _moves(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of tensors to copy: buckets of the two, so that the threads share a large tensor."""
    is_plain = source.is_contiguous() and not source.is_conj() and not source.is_neg() and source.is_cpu
    if not is_plain or source.nbytes <= BUCKET:
        yield source, target
        return
    one, other = as_bytes(source), as_bytes(target)
    for begin in range(0, one.numel(), BUCKET):
        yield one[begin : begin + BUCKET], other[begin : begin + BUCKET]


def _batches(moves: Iterable[tuple[Tensor, Tensor]]) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield groups of moves of about a bucket: a thread for each small tensor would cost more than its copy."""
    batch: list[tuple[Tensor, Tensor]] = []
    size = 0
    for move in moves:
        batch.append(move)
        size += move[1].nbytes
        if size >= BUCKET:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _move_all(batch: list[tuple[Tensor, Tensor]]) -> None:
    with torch.no_grad():
        for source, target in batch:
            # From a device without pinned memory the copy must be complete when this returns.
            target.copy_(source, non_blocking=not source.is_cpu and target.is_pinned())
