"""Saving: preparation while the training waits, and writing, in the background if wanted."""

from __future__ import annotations

import bisect
import importlib.metadata
import time
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any

import torch

from dstrat.checkpoint.portable.decode import TAG
from dstrat.checkpoint.portable.encode import encode
from dstrat.checkpoint.portable.format import (
    BUCKET,
    DTYPES,
    INDEX,
    LARGEST_JSON,
    PER_RANK,
    SAVED_WITH,
    STATE,
    FileRecord,
    Manifest,
    block_checksums,
    dtype_name,
    dump_json,
    parse_json,
    rank_file,
)
from dstrat.checkpoint.portable.index import check_shares
from dstrat.checkpoint.portable.local_files import UnfinishedFolder
from dstrat.checkpoint.portable.newest import point_to
from dstrat.checkpoint.portable.write_plan import make_write_plan, tensor_layouts
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
    from pathlib import Path

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.checkpoint.portable.index import TensorEntry
    from dstrat.checkpoint.portable.payload import Payload
    from dstrat.checkpoint.portable.ranks import Ranks
    from dstrat.checkpoint.portable.storage import Storage, Unfinished


_installed_version = cache(importlib.metadata.version)  # reads and parses a file in each call


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """The files of this rank, before they are written.

    Attributes:
        state: The job's plain values as JSON; only rank 0 writes them.
        rank_state: This rank's plain values as JSON.
        shard: This rank's boxes of tensors.
        entries: Index entries of the tensors that this rank has, without pieces.
        strategy: Alias of the strategy.
        ranks: The ranks that prepared the save.  The same ones write it, since a background write may go on after the
            job has opened another process group.
    """

    state: bytes
    rank_state: bytes
    shard: ShardFile
    entries: Mapping[str, TensorEntry]
    strategy: str
    ranks: Ranks


def prepare(checkpoint: Mapping[str, Any], ranks: Ranks) -> Prepared:
    """Encode the plain values, and assign each tensor to the ranks that write it; collective.

    Args:
        checkpoint: Nested values; each rank has its own ones under ``"per_rank"``.
        ranks: The ranks of the job.

    Raises:
        CheckpointError: A value cannot be saved, on any rank.
    """
    with ranks.on_all_ranks("save its checkpoint"):
        job = encode({key: value for key, value in checkpoint.items() if key != PER_RANK})
        rank = encode(checkpoint.get(PER_RANK, {}), keys=(PER_RANK, ranks.rank))
        state = _limited(dump_json(job.value), "plain values")
        rank_state = _limited(dump_json(rank.value), "plain values of this rank")
        # Two calls: a tensor of one rank may share memory with one of the job, but must not become an alias of it.
        layouts, rank_layouts = tensor_layouts(job.tensors), tensor_layouts(rank.tensors)
    write_plan = make_write_plan(layouts, rank_layouts, ranks)
    return Prepared(
        state=state,
        rank_state=rank_state,
        shard=arrange(write_plan.payloads),
        entries=write_plan.entries,
        strategy=strategy if isinstance(strategy := checkpoint.get(SAVED_WITH), str) else "",
        ranks=ranks,
    )


def _limited(data: bytes, content: str) -> bytes:
    if len(data) > LARGEST_JSON:  # the reader would refuse the file
        raise CheckpointError(
            f"its {content} take {len(data)} bytes as JSON, and {LARGEST_JSON} is the limit: use tensors"
        )
    return data


def write(
    prepared: Prepared,
    target: CheckpointPath,
    storage: Storage[Any],
    *,
    moves_existing: bool = False,
    after_move: Callable[[CheckpointPath, Path, Storage[Any]], None],
) -> None:
    """Write the prepared files of every rank, then give the checkpoint its path; collective.

    Args:
        prepared: The files.
        target: The path.
        storage: Of the path.
        moves_existing: Whether what is at the path is moved beside it, at the end; on a disk only.
        after_move: Called on rank 0, if something was there, with the path, where that is now, and the storage.

    Raises:
        CheckpointError: A rank failed; then all ranks raise, and the unfinished checkpoint is removed.
    """
    ranks = prepared.ranks
    folder: Unfinished | None = None
    try:
        with ranks.on_all_ranks(f"create checkpoint {str(target)!r}"):
            if ranks.rank == 0:
                begin = partial(UnfinishedFolder, moves_existing=True) if moves_existing else storage.begin_checkpoint
                folder = begin(target)
        # On a disk it has a temporary name until the commit, which only rank 0 knows.
        name = ranks.broadcast(b"" if folder is None else folder.path.name.encode()).decode()
        with ranks.on_all_ranks(f"write checkpoint {str(target)!r}"):
            report = write_rank_files(prepared, target.parent / name, ranks.rank, storage)
        # Each rank reports after it has flushed its files, so that the commit comes after all of them.
        other_reports = ranks.gather(dump_json(report))[1:] if ranks.size > 1 else []
        # No rank returns before the commit: what follows a save may remove the checkpoint before it.
        with ranks.on_all_ranks(f"complete checkpoint {str(target)!r}"):
            if folder is not None:
                all_reports = [report, *map(parse_json, other_reports)]
                folder.commit(complete(prepared, folder.path, all_reports, storage))
                point_to(target, storage)  # only now: it must never name a checkpoint that is not complete
                if folder.moved_to is not None:
                    after_move(target, folder.moved_to, storage)
    finally:
        if folder is not None:
            folder.close()


def write_rank_files(prepared: Prepared, folder: CheckpointPath, rank: int, storage: Storage[Any]) -> dict[str, Any]:
    """Write this rank's files to a folder of the storage, and return the report for rank 0's index and manifest."""
    if storage.is_local and not folder.is_dir():
        raise CheckpointError(
            f"rank 0 created {str(folder)!r}, which is not here: give a path on a file system that all ranks share"
        )
    shard, name = prepared.shard, rank_file(rank, "json")
    files = {name: _write_document(storage, folder / name, prepared.rank_state)}
    if shard.payloads:
        name = rank_file(rank, "safetensors")
        checksums = storage.write_buckets(folder / name, shard.size, shard.bucket)
        files[name] = FileRecord(size=shard.size, checksums="".join(checksums))
    pieces: dict[str, list[Any]] = {}
    for payload, begin in zip(shard.payloads, shard.begins, strict=True):
        is_full = payload.shape == prepared.entries[payload.name].shape
        # Most tensors are one piece, whose box is the full tensor: the short form keeps the index small.
        box = [] if is_full else [list(payload.starts), list(payload.shape)]
        pieces.setdefault(payload.name, []).append([begin, *box])
    return {
        "files": {name: [record.size, record.checksums] for name, record in files.items()},
        # Rank 0 reports all its tensors; the others only those that they write, and those without bytes to write.
        "entries": {
            name: [entry.dtype, list(entry.shape), entry.same_as]
            for name, entry in prepared.entries.items()
            if rank == 0 or name in pieces or entry.same_as or not entry.num_bytes
        },
        "pieces": pieces,
        "values": [] if rank == 0 else list(_values_beside(parse_json(prepared.state), _first_pieces(pieces))),
    }


def _first_pieces(pieces: Mapping[str, Sequence[Any]]) -> set[str]:
    """Return the tensors of which a rank writes the first element."""
    return {name for name, listed in pieces.items() if any(len(piece) == 1 or not any(piece[1]) for piece in listed)}


def _values_beside(value: Any, names: Container[str], *keys: Any) -> Iterator[list[Any]]:
    """Yield the plain values, and lists of tensors, in dicts that have one of some tensors too, with the dicts' keys.

    Rank 0 writes the plain values, and may lack those of parameters that only other ranks have: of the stages of a
    pipeline.  One rank writes the first element of a tensor, so that one of them yields a value.
    """
    if isinstance(value, list):
        for number, item in enumerate(value):
            yield from _values_beside(item, names, *keys, number)
    elif isinstance(value, dict) and TAG not in value:
        inner = {key for key, item in value.items() if _holds_dicts(item)}
        values = {key: item for key, item in value.items() if key not in inner and not _is_tensor(item)}
        beside = (item for key, item in value.items() if key not in inner)
        if values and any(name in names for item in beside for name in _tensor_names(item)):
            yield [keys, values]
        for key in inner:
            yield from _values_beside(value[key], names, *keys, key)


def _holds_dicts(value: Any) -> bool:
    if isinstance(value, list):
        return any(map(_holds_dicts, value))
    return isinstance(value, dict) and TAG not in value


def _is_tensor(value: Any) -> bool:
    return isinstance(value, dict) and value.get(TAG) == "tensor"


def _tensor_names(value: Any) -> Iterator[str]:
    if _is_tensor(value):
        yield value["name"]
    for item in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _tensor_names(item)


def _with_values(state: bytes, values: Iterable[tuple[Sequence[Any], Mapping[str, Any]]]) -> bytes:
    """Return the plain values of rank 0 with those that it lacks."""
    document = parse_json(state)
    for keys, added in values:
        inner = document
        for key in keys:
            inner = inner.setdefault(key, {}) if isinstance(inner, dict) else inner[key]
        for key, value in added.items():
            inner.setdefault(key, value)
    return dump_json(document)


def _write_document(storage: Storage[Any], path: CheckpointPath, data: bytes) -> FileRecord:
    storage.write_file(path, data)
    return FileRecord(size=len(data), checksums=block_checksums([memoryview(data)]))


def complete(
    prepared: Prepared, folder: CheckpointPath, reports: Sequence[Mapping[str, Any]], storage: Storage[Any]
) -> bytes:
    """Write the plain values and the index of all ranks, and return the manifest."""
    files = {
        name: FileRecord(size=size, checksums=checksums)
        for report in reports
        for name, (size, checksums) in report["files"].items()
    }
    index = _index(reports)
    check_shares(index["tensors"], index["files"])  # such a checkpoint could not be loaded
    values = [beside for report in reports for beside in report["values"]]
    state = _limited(_with_values(prepared.state, values), "plain values") if values else prepared.state
    files[STATE] = _write_document(storage, folder / STATE, state)
    files[INDEX] = _write_document(storage, folder / INDEX, _limited(dump_json(index), "tensors' names"))
    manifest = Manifest(
        files=files,
        strategy=prepared.strategy,
        world_size=len(reports),
        created_ns=time.time_ns(),
        dstrat=_installed_version("dstrat"),
        torch=torch.__version__,
    )
    return _limited(manifest.to_bytes(), "checksums")


def _index(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the content of the index file: the tensors of all ranks, with their pieces in ascending order."""
    tensors: dict[str, dict[str, Any]] = {}
    for report in reports:
        for name, (dtype, shape, same_as) in report["entries"].items():
            origin = {"pieces": []} if same_as is None else {"same_as": same_as}
            first = tensors.setdefault(name, {"dtype": dtype, "shape": shape, **origin})
            if (first["dtype"], first["shape"]) != (dtype, shape) or (same_as is None and "same_as" in first):
                raise ValueError(f"the ranks have different dtypes, shapes or aliases of tensor {name[:200]!r}")
    writers = [rank for rank, report in enumerate(reports) if report["pieces"]]
    for number, rank in enumerate(writers):
        for name, pieces in reports[rank]["pieces"].items():
            tensors[name]["pieces"] += [[number, *piece] for piece in pieces]
    for tensor in tensors.values():
        if len(tensor.get("pieces", ())) > 1:
            tensor["pieces"].sort(key=lambda piece: piece[2:])  # by their starts
    return {"files": [rank_file(rank, "safetensors") for rank in writers], "tensors": tensors}


# A rank's boxes of tensors as one safetensors file, written in several threads that compute the checksums too


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """The layout of a safetensors file.

    Attributes:
        header: The first bytes of the file.
        payloads: Follow the header, without gaps.
        begins: Position of the first byte of each payload.
        size: Of the file in bytes.
    """

    header: bytes
    payloads: Sequence[Payload]
    begins: Sequence[int]
    size: int

    @property
    def devices(self) -> set[torch.device]:
        """The devices of the payloads."""
        return {payload.tensor.device for payload in self.payloads}

    def bucket(self, begin: int) -> list[memoryview]:
        """Return the bytes of the bucket that begins at a position of the file, in consecutive views."""
        end = begin + BUCKET
        views = [memoryview(self.header)[begin:end]] if begin < len(self.header) else []
        # From the payload in which the first byte is; there may be a hundred thousand before it.
        position = max(0, bisect.bisect_right(self.begins, begin) - 1)
        for payload, first in zip(self.payloads[position:], self.begins[position:], strict=True):
            if first >= end:
                break
            low, high = max(begin - first, 0), min(end - first, payload.num_bytes)
            if low < high:
                views.append(payload.view(low, high))
        return views


def arrange(payloads: Sequence[Payload]) -> ShardFile:
    """Return the layout of the file for some payloads."""
    # Larger elements first, so that every payload is aligned to its element size without padding.
    ordered = sorted(
        payloads, key=lambda payload: (-DTYPES[dtype_name(payload.dtype)].size, payload.name, payload.starts)
    )
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, reached = [], 0
    for payload in ordered:
        facts = DTYPES[dtype_name(payload.dtype)]
        # A tensor may have several boxes, and the header needs a key for each; a tensor may be called "__metadata__".
        is_unique = not any(payload.starts) and payload.name not in entries
        key = payload.name if is_unique else f"{payload.name}[{','.join(map(str, payload.starts))}]"
        shape = [*payload.shape, facts.columns] if facts.columns > 1 else payload.shape
        entries[key] = {"dtype": facts.code, "shape": shape, "data_offsets": [reached, reached + payload.num_bytes]}
        offsets.append(reached)
        reached += payload.num_bytes
    text = dump_json(entries)
    text += b" " * (-len(text) % 64)  # aligns the first payload; safetensors allows trailing spaces
    header = len(text).to_bytes(8, "little") + text
    begins = [len(header) + offset for offset in offsets]
    return ShardFile(header=header, payloads=ordered, begins=begins, size=len(header) + reached)
