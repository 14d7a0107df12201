"""Save: first what needs the training to stand still, then what writes."""

from __future__ import annotations

import bisect
import importlib.metadata
import time
from dataclasses import dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

import torch

from dstrat.checkpoint.portable.decode import joined
from dstrat.checkpoint.portable.encode import Encoded, encode
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
from dstrat.checkpoint.portable.index import Piece, TensorEntry, index_from_json, index_to_json
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.checkpoint.portable.write_plan import plan
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.checkpoint.paths import Place
    from dstrat.checkpoint.portable.ranks import Ranks
    from dstrat.checkpoint.portable.shards import Payload
    from dstrat.checkpoint.portable.storage import Unfinished


_installed_version = cache(importlib.metadata.version)  # it reads and parses a file


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """What this rank is going to write.

    Attributes:
        state: The job's plain values; only rank 0 writes them.
        own: This rank's plain values.
        shard: Its parts of tensors.
        entries: The tensors that it knows, without pieces.
        strategy: Alias of the strategy.
        ranks: The job that prepared it; it is what writes it, whatever has become of the process group.
    """

    state: bytes
    own: bytes
    shard: ShardFile
    entries: Mapping[str, TensorEntry]
    strategy: str
    ranks: Ranks


def prepare(checkpoint: Mapping[str, Any], ranks: Ranks) -> Prepared:
    """Encode the plain values, and decide with the other ranks who writes which tensors; collective.

    Args:
        checkpoint: Nested values; what is under ``"per_rank"`` is this rank's own.
        ranks: The job.

    Raises:
        CheckpointError: Something in it cannot be saved, on whichever rank.
    """
    with ranks.together("save its checkpoint"):
        job = encode({key: value for key, value in checkpoint.items() if key != PER_RANK})
        own = encode(checkpoint.get(PER_RANK, {}), path=joined(PER_RANK, ranks.rank))
        state, own_state = _document(job, "plain values"), _document(own, "plain values of this rank")
    decided = plan(job.tensors, own.tensors, ranks)
    return Prepared(
        state=state,
        own=own_state,
        shard=arrange(decided.payloads),
        entries=decided.entries,
        strategy=strategy if isinstance(strategy := checkpoint.get(SAVED_WITH), str) else "",
        ranks=ranks,
    )


def _document(encoded: Encoded, what: str) -> bytes:
    return _limited(dump_json(encoded.value), what)


def _limited(data: bytes, what: str) -> bytes:
    if len(data) > LARGEST_JSON:
        raise CheckpointError(
            f"its {what} take {len(data)} bytes as JSON, and {LARGEST_JSON} is the limit: use tensors"
        )
    return data


def write(prepared: Prepared, target: Place) -> None:
    """Write what every rank has prepared, and let it appear under the target's path; collective.

    Raises:
        CheckpointError: It failed on some rank; then it is not there on any, and nothing is left of it.
    """
    ranks = prepared.ranks
    folder: Unfinished | None = None
    try:
        with ranks.together(f"create checkpoint {str(target)!r}"):
            folder = storage_of(target).begin_checkpoint(target) if ranks.rank == 0 else None
        name = ranks.tell(b"" if folder is None else folder.path.name.encode()).decode()
        with ranks.together(f"write checkpoint {str(target)!r}"):
            report = _write_own(prepared, target.parent / name, ranks.rank)
        reports = ranks.gather(report)
        with ranks.together(f"complete checkpoint {str(target)!r}"):
            if folder is not None:
                folder.commit(_complete(prepared, folder.path, [parse_json(report) for report in reports]))
    finally:
        if folder is not None:
            folder.close()


def _write_own(prepared: Prepared, folder: Place, rank: int) -> bytes:
    """Write this rank's files, and return what rank 0 has to know about them."""
    if storage_of(folder).is_local and not folder.is_dir():
        raise CheckpointError(f"rank 0 created {str(folder)!r}, which is not here: all ranks must see the same files")
    files = {rank_file(rank, "json"): _write_document(folder / rank_file(rank, "json"), prepared.own)}
    if prepared.shard.payloads:
        name = rank_file(rank, "safetensors")
        files[name] = write_shard_file(prepared.shard, folder / name)
    pieces: dict[str, list[Any]] = {}
    for payload, begin in zip(prepared.shard.payloads, prepared.shard.begins, strict=True):
        pieces.setdefault(payload.name, []).append([begin, payload.starts, payload.shape])
    return dump_json(
        {
            "files": {name: [record.size, record.checksums] for name, record in files.items()},
            "entries": {
                name: [entry.dtype, entry.shape, entry.same_as]
                for name, entry in prepared.entries.items()
                if rank == 0 or name in pieces or entry.same_as or not entry.num_bytes
            },
            "pieces": pieces,
        }
    )


def _write_document(path: Place, data: bytes) -> FileRecord:
    storage_of(path).write_file(path, data)
    return FileRecord(size=len(data), checksums=block_checksums([memoryview(data)]))


def _complete(prepared: Prepared, folder: Place, reports: list[dict[str, Any]]) -> bytes:
    """Write what rank 0 writes for all, plain values and index, and return the manifest."""
    files = {
        name: FileRecord(size=size, checksums=checksums)
        for report in reports
        for name, (size, checksums) in report["files"].items()
    }
    index = _index(reports)
    files[STATE] = _write_document(folder / STATE, prepared.state)
    index_from_json(index, {name: record.size for name, record in files.items()})  # or it could not be read back
    files[INDEX] = _write_document(folder / INDEX, _limited(dump_json(index), "tensors' names"))
    manifest = Manifest(
        files=files,
        strategy=prepared.strategy,
        world_size=len(reports),
        created_ns=time.time_ns(),
        dstrat=_installed_version("dstrat"),
        torch=torch.__version__,
    )
    return _limited(manifest.to_bytes(), "checksums")


def _index(reports: list[dict[str, Any]]) -> dict[str, Any]:
    pieces: dict[str, list[Piece]] = {}
    entries: dict[str, TensorEntry] = {}
    for rank, report in enumerate(reports):
        for name, (dtype, shape, same_as) in report["entries"].items():
            entries.setdefault(name, TensorEntry(dtype=dtype, shape=tuple(shape), same_as=same_as))
        for name, stored in report["pieces"].items():
            pieces.setdefault(name, []).extend(
                Piece(file=rank_file(rank, "safetensors"), begin=begin, starts=tuple(starts), shape=tuple(shape))
                for begin, starts, shape in stored
            )
    return index_to_json(
        {
            name: replace(entry, pieces=tuple(sorted(pieces.get(name, ()), key=lambda piece: piece.starts)))
            for name, entry in entries.items()
        }
    )


# Writing one rank's parts of tensors as a safetensors file, in parallel, with checksums on the way.


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """Where everything goes in a file.

    Attributes:
        header: The file's first bytes.
        payloads: What follows, without gaps.
        begins: Position of the first byte of each.
    """

    header: bytes
    payloads: Sequence[Payload]
    begins: Sequence[int]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.begins[-1] + self.payloads[-1].num_bytes if self.payloads else len(self.header)

    def views(self, begin: int, end: int) -> list[memoryview]:
        """Return the bytes of the file between two positions."""
        found = [memoryview(self.header)[begin:end]] if begin < len(self.header) else []
        position = max(0, bisect.bisect_right(self.begins, begin) - 1)
        for payload, first in zip(self.payloads[position:], self.begins[position:], strict=True):
            if first >= end:
                break
            low, high = max(begin - first, 0), min(end - first, payload.num_bytes)
            if low < high:
                found.append(payload.view(low, high))
        return found


def arrange(payloads: Sequence[Payload]) -> ShardFile:
    """Return where each part goes; parts with larger elements come first, so that all are aligned."""
    ordered = sorted(
        payloads, key=lambda payload: (-DTYPES[dtype_name(payload.dtype)].size, payload.name, payload.starts)
    )
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends, reached = [], 0
    for payload in ordered:
        entries[_key(payload, entries)] = _header_entry(payload, reached)
        reached += payload.num_bytes
        ends.append(reached)
    text = dump_json(entries)
    text += b" " * (-len(text) % 64)
    header = len(text).to_bytes(8, "little") + text
    begins = [len(header) + end - payload.num_bytes for payload, end in zip(ordered, ends, strict=True)]
    return ShardFile(header=header, payloads=ordered, begins=begins)


def _key(payload: Payload, taken: dict[str, Any]) -> str:
    """Return the name in the header: the tensor's, and where in the tensor a part begins that is not its first."""
    if not any(payload.starts) and payload.name not in taken:
        return payload.name
    return f"{payload.name}[{','.join(map(str, payload.starts))}]"


def _header_entry(payload: Payload, begin: int) -> dict[str, Any]:
    facts = DTYPES[dtype_name(payload.dtype)]
    shape = [*payload.shape, facts.columns] if facts.columns > 1 else list(payload.shape)
    return {"dtype": facts.code, "shape": shape, "data_offsets": [begin, begin + payload.num_bytes]}


def write_shard_file(file: ShardFile, path: Place) -> FileRecord:
    """Write the file so that it survives a crash, and return what the manifest says of it.

    Raises:
        OSError: The disk is full, or the like.
    """
    checksums = storage_of(path).write_buckets(
        path, file.size, lambda begin: file.views(begin, min(begin + BUCKET, file.size))
    )
    return FileRecord(size=file.size, checksums="".join(checksums))
