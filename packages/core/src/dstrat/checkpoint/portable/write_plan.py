"""Write plan: each tensor is written once, and all ranks write as much."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.portable.format import DTYPES, MEBIBYTE, dtype_name, dump_json, parse_json
from dstrat.checkpoint.portable.index import TensorEntry
from dstrat.checkpoint.portable.shards import (
    LocalBox,
    Payload,
    check_kind,
    holders,
    is_distributed,
    is_sharded,
    local_boxes,
)
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch import Tensor

    from dstrat.checkpoint.portable.ranks import Ranks

_SHARED_FROM = 64 * MEBIBYTE
"""Bytes from which a tensor that every rank has is written by several of them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePlan:
    """What this rank writes.

    Attributes:
        payloads: The parts.
        entries: The tensors that this rank knows, without pieces.
    """

    payloads: Sequence[Payload]
    entries: Mapping[str, TensorEntry]


def plan(tensors: Mapping[str, Tensor], own: Mapping[str, Tensor], ranks: Ranks) -> WritePlan:
    """Decide with the other ranks who writes what; collective.

    Args:
        tensors: What belongs to the whole job: plain tensors are the same on every rank that has them.
        own: What belongs to this rank only.
        ranks: The job.

    Raises:
        CheckpointError: A tensor cannot be saved, or differs between ranks.
    """
    with ranks.together("save its tensors"):
        # Apart: what differs between ranks is no other name for the tensor of all of them with which it shares memory.
        entries = _entries(tensors) | _entries(own)
    leaders = _leaders(tensors, ranks)
    with ranks.together("save its tensors"):
        payloads = [Payload(name, box) for name in own if _is_stored(entries[name]) for box in local_boxes(own[name])]
        payloads += _distributed(tensors, entries, leaders)
        shared = {name: entries[name] for name, tensor in tensors.items() if not is_sharded(tensor)}
    everyone = _hear(shared, sum(payload.num_bytes for payload in payloads), ranks)
    payloads += [Payload(name, part) for name, part in _assigned(tensors, everyone, ranks)]
    return WritePlan(payloads=payloads, entries=entries)


def _entries(tensors: Mapping[str, Tensor]) -> dict[str, TensorEntry]:
    """Return what the index says of each tensor; of those that share their memory only the first is stored."""
    first: dict[Any, str] = {}
    entries = {}
    for name, tensor in tensors.items():
        check_kind(tensor, name)
        dtype = dtype_name(tensor.dtype)
        if dtype not in DTYPES:
            raise CheckpointError(f"tensor {name!r} has the dtype {dtype}, which the format does not know: convert it")
        same_as = first.setdefault(_memory(tensor, name), name)
        entries[name] = TensorEntry(
            dtype=dtype, shape=tuple(tensor.shape), same_as=None if same_as == name else same_as
        )
    return entries


def _memory(tensor: Any, name: str) -> Any:
    """Return what two tensors have in common when one is the other."""
    if isinstance(tensor, FlatShard):
        return id(tensor)
    local = tensor.to_local() if is_distributed(tensor) else tensor
    if local.numel() == 0:
        return name
    place = tensor.placements if is_distributed(tensor) else None
    view = (local.stride(), local.is_conj(), local.is_neg())
    # Tensors of some backends have no address that torch sees: 0 would make all of one shape the same.
    address = local.data_ptr() or (local.untyped_storage()._cdata, local.storage_offset())  # noqa: SLF001 - no other id
    return tensor.dtype, tensor.shape, local.device, address, view, place


def _is_stored(entry: TensorEntry) -> bool:
    return entry.same_as is None


def _leaders(tensors: Mapping[str, Any], ranks: Ranks) -> dict[str, int]:
    """Return, for each tensor that is distributed over some of the ranks only, which mesh writes it, by its first rank.

    Such a tensor may be there once for each mesh: a layer that is sharded inside of every group of ranks.
    """
    mine = {
        name: int(tensor.device_mesh.mesh.min())
        for name, tensor in tensors.items()
        if is_distributed(tensor) and tensor.device_mesh.size() < ranks.size
    }
    leaders: dict[str, int] = {}
    for told in ranks.exchange(dump_json(mine)):
        for name, first in parse_json(told).items():
            leaders[name] = min(first, leaders.get(name, first))
    return leaders


def _distributed(
    tensors: Mapping[str, Any], entries: Mapping[str, TensorEntry], leaders: Mapping[str, int]
) -> Iterable[Payload]:
    """Yield this rank's shards; of those that several ranks hold, each rank takes its turn."""
    for turn, (name, tensor) in enumerate(tensors.items()):
        if not is_sharded(tensor) or not _is_stored(entries[name]):
            continue
        if isinstance(tensor, FlatShard):
            yield from (Payload(name, box) for box in local_boxes(tensor, name))
            continue
        if name in leaders and int(tensor.device_mesh.mesh.min()) != leaders[name]:
            continue
        same = holders(tensor)
        if same and same[turn % len(same)] == tensor.device_mesh.get_rank():
            for box in local_boxes(tensor, name):
                yield Payload(name, box)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Everyone:
    """What the ranks have told each other.

    Attributes:
        entries: The plain tensors of all ranks.
        holders: The ranks that have each of them.
        loads: Bytes that each rank has to write anyway.
    """

    entries: Mapping[str, TensorEntry]
    holders: Mapping[str, Sequence[int]]
    loads: Sequence[int]


def _hear(shared: Mapping[str, TensorEntry], load: int, ranks: Ranks) -> _Everyone:
    facts = {name: [entry.dtype, list(entry.shape), entry.same_as] for name, entry in shared.items()}
    digest = hashlib.blake2b(dump_json(facts), digest_size=16).hexdigest()
    told = [parse_json(message) for message in ranks.exchange(dump_json([digest, load]))]
    loads = [load for _, load in told]
    if all(other == digest for other, _ in told):
        return _Everyone(entries=shared, holders=dict.fromkeys(shared, range(ranks.size)), loads=loads)
    lists = _exchanged(facts, ranks)
    union = {
        name: TensorEntry(dtype=dtype, shape=tuple(shape), same_as=same_as)
        for listed in lists
        for name, (dtype, shape, same_as) in listed.items()
    }
    return _Everyone(entries=union, holders=_merged(lists), loads=loads)


def _exchanged(facts: Mapping[str, Any], ranks: Ranks) -> list[dict[str, Any]]:
    """Return what each rank says of its tensors; only rank 0 tells all, and the others how theirs differ; collective.

    Rank 0 alone has buffers, so that there is a difference in most jobs, and a small one.
    """
    first: dict[str, Any] = parse_json(ranks.tell(dump_json(facts) if ranks.rank == 0 else b""))
    missing = [number for number, name in enumerate(first) if facts.get(name) != first[name]]
    more = {name: fact for name, fact in facts.items() if first.get(name) != fact}
    lists = []
    for told in ranks.exchange(dump_json([missing, more])):
        without, others = parse_json(told)
        left_out = set(without)
        lists.append({name: fact for number, (name, fact) in enumerate(first.items()) if number not in left_out})
        lists[-1].update(others)
    return lists


def _merged(lists: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return which ranks have which tensor, where they do not have the same ones (stages of a pipeline)."""
    found: dict[str, list[int]] = {}
    for rank, facts in enumerate(lists):
        for name, fact in facts.items():
            same = found.setdefault(name, [])
            if same and lists[same[0]][name] != fact:
                (one_dtype, one_shape, _), (dtype, shape, _) = lists[same[0]][name], fact
                raise CheckpointError(
                    f"tensor {name!r} is {one_dtype} of shape {tuple(one_shape)} on rank {same[0]}, and {dtype} of "
                    f"shape {tuple(shape)} on rank {rank}: a plain tensor must be the same on every rank, what "
                    "differs belongs under 'per_rank' or into a DTensor"
                )
            same.append(rank)
    return found


def _assigned(tensors: Mapping[str, Tensor], everyone: _Everyone, ranks: Ranks) -> Iterable[tuple[str, LocalBox]]:
    """Yield this rank's share of the plain tensors: the largest goes first to whoever has least to write."""
    boxes = [
        (num_bytes, name, first, count)
        for name, entry in everyone.entries.items()
        if _is_stored(entry) and entry.num_bytes
        for first, count, num_bytes in _rows(entry, len(everyone.holders[name]))
    ]
    loads = list(everyone.loads)
    for num_bytes, name, first, count in sorted(boxes, key=lambda box: (-box[0], box[1], box[2])):
        writer = min(everyone.holders[name], key=loads.__getitem__)
        loads[writer] += num_bytes
        if writer == ranks.rank:
            yield name, _box(tensors[name].detach(), first, count)


def _box(tensor: Tensor, first: int, count: int) -> LocalBox:
    if tensor.dim() == 0:
        return LocalBox(tensor=tensor, starts=())
    return LocalBox(tensor=tensor.narrow(0, first, count), starts=(first,) + (0,) * (tensor.dim() - 1))


def _rows(entry: TensorEntry, num_holders: int) -> Iterable[tuple[int, int, int]]:
    """Yield first row, number of rows and bytes of the boxes that a tensor is written in."""
    rows = entry.shape[0] if entry.shape else 1
    boxes = max(1, min(num_holders, rows, entry.num_bytes // _SHARED_FROM))
    step = -(-rows // boxes)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        yield first, count, entry.num_bytes // rows * count
