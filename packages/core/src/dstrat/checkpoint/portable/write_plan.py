"""Write plan: the ranks that write each tensor, with the load balanced between them."""

from __future__ import annotations

import hashlib
import heapq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dstrat.checkpoint.portable.format import (
    DTYPES,
    LARGEST_DIMENSIONS,
    MEBIBYTE,
    dtype_name,
    dump_json,
    parse_json,
)
from dstrat.checkpoint.portable.index import TensorEntry
from dstrat.checkpoint.portable.payload import Payload, check_kind, memory_key
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard
from dstrat.parallel.shards import LocalBox, holders, is_distributed, local_boxes

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dstrat.checkpoint.portable.ranks import Ranks

_SPLIT_SIZE = 64 * MEBIBYTE
"""Least bytes of a box when several ranks share the writing of a replicated tensor."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorLayout:
    """A tensor of a save: the elements in this process, and its entry in the index.

    Attributes:
        tensor: The tensor.
        entry: Its index entry, without pieces.
        is_flat: Whether it is a :class:`FlatShard`.
        is_distributed: Whether it is a ``DTensor``.
    """

    tensor: Any
    entry: TensorEntry
    is_flat: bool
    is_distributed: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class WritePlan:
    """This rank's share of a save.

    Attributes:
        payloads: The boxes that this rank writes.
        entries: Index entries of the tensors that this rank has, without pieces.
    """

    payloads: Sequence[Payload]
    entries: Mapping[str, TensorEntry]


def make_write_plan(
    layouts: Mapping[str, TensorLayout], rank_layouts: Mapping[str, TensorLayout], ranks: Ranks
) -> WritePlan:
    """Assign each tensor to the ranks that write it; collective.

    Args:
        layouts: The job's tensors: DTensors, FlatShards, and plain tensors that are equal on every rank that has them.
        rank_layouts: This rank's own tensors.
        ranks: The ranks of the job.

    Raises:
        CheckpointError: A tensor cannot be saved, or differs between ranks.
    """
    everything = {**layouts, **rank_layouts}
    entries = {name: layout.entry for name, layout in everything.items()}
    if ranks.size == 1:  # it writes everything
        with ranks.on_all_ranks("save its tensors"):
            return WritePlan(payloads=_unshared_payloads(everything), entries=entries)
    sharded = {name: layout for name, layout in layouts.items() if layout.is_flat or layout.is_distributed}
    shared = {name: layout.entry for name, layout in layouts.items() if name not in sharded}
    leaders = _leaders(sharded, ranks)
    with ranks.on_all_ranks("save its tensors"):
        payloads = [*_unshared_payloads(rank_layouts), *_sharded_payloads(sharded, leaders)]
    all_ranks = _exchange_entries(shared, sum(payload.num_bytes for payload in payloads), ranks)
    payloads += _assigned_payloads(layouts, all_ranks, ranks)
    return WritePlan(payloads=payloads, entries=entries)


@torch.no_grad()  # in which a DTensor gives its elements without recording that
def tensor_layouts(tensors: Mapping[str, Any]) -> dict[str, TensorLayout]:
    """Describe each tensor of a save; of tensors that share their memory only the first is stored.

    Raises:
        CheckpointError: The format has no such tensor.
    """
    first: dict[Any, str] = {}
    layouts = {}
    for name, tensor in tensors.items():
        check_kind(tensor, name)
        dtype = dtype_name(tensor.dtype)
        if dtype not in DTYPES:
            raise CheckpointError(f"tensor {name!r} has the dtype {dtype}, which the format does not know: convert it")
        if len(tensor.shape) > LARGEST_DIMENSIONS:
            raise CheckpointError(
                f"tensor {name!r} has {len(tensor.shape)} dimensions, and the format has at most {LARGEST_DIMENSIONS}: "
                "reshape it"
            )
        is_flat = isinstance(tensor, FlatShard)
        distributed = not is_flat and is_distributed(tensor)
        memory: Any = id(tensor)
        if not is_flat:
            local = tensor.to_local() if distributed else tensor
            placements = tensor.placements if distributed else None
            # By the name without elements: empty tensors all have the address 0.
            memory = (memory_key(local), tensor.shape, placements) if local.numel() else name
        same_as = first.setdefault(memory, name)
        entry = TensorEntry(dtype=dtype, shape=tuple(tensor.shape), same_as=None if same_as == name else same_as)
        layouts[name] = TensorLayout(tensor=tensor, entry=entry, is_flat=is_flat, is_distributed=distributed)
    return layouts


def _leaders(layouts: Mapping[str, TensorLayout], ranks: Ranks) -> dict[str, int]:
    """Return the first rank of the mesh that writes each DTensor; collective.

    Only DTensors of a sub-mesh are in the result.  A layer that is sharded within each group of ranks exists once in
    every group, under the same name, and one group writes it.
    """
    first_ranks = {
        name: int(layout.tensor.device_mesh.mesh.min())
        for name, layout in layouts.items()
        if layout.is_distributed and layout.tensor.device_mesh.size() < ranks.size
    }
    leaders: dict[str, int] = {}
    for message in ranks.exchange(dump_json(first_ranks)):
        for name, first in parse_json(message).items():
            leaders[name] = min(first, leaders.get(name, first))
    return leaders


def _unshared_payloads(layouts: Mapping[str, TensorLayout]) -> list[Payload]:
    """Return the boxes of tensors that no other rank writes; an alias has none."""
    return [
        Payload(name, box)
        for name, layout in layouts.items()
        if layout.entry.same_as is None
        for box in local_boxes(layout.tensor, name)
    ]


def _sharded_payloads(layouts: Mapping[str, TensorLayout], leaders: Mapping[str, int]) -> Iterable[Payload]:
    """Yield the shards that this rank writes; the ranks that hold equal shards take turns from tensor to tensor."""
    # Turns of sharded tensors only: rank 0 has plain ones, such as buffers, that other ranks leave out.
    for turn, (name, layout) in enumerate(layouts.items()):
        tensor = layout.tensor
        if layout.entry.same_as is not None:
            continue
        if layout.is_flat:
            yield from (Payload(name, box) for box in local_boxes(tensor, name))
            continue
        if name in leaders:
            # Another group of ranks has the same tensor, and writes it.  The ranks of its mesh may be those of the
            # group, so that several groups seem to have the first ones.
            members = tensor.device_mesh.mesh
            if int(members.min()) != leaders[name] or not (members == tensor.device_mesh.get_rank()).any():
                continue
        same = holders(tensor)
        if same and same[turn % len(same)] == tensor.device_mesh.get_rank():
            yield from (Payload(name, box) for box in local_boxes(tensor, name))


@dataclass(frozen=True, kw_only=True, slots=True)
class _AllRanks:
    """The plain tensors of all ranks, as every rank knows them after an exchange.

    Attributes:
        entries: Index entries, by name.
        holders: The ranks that have each tensor.
        loads: Bytes that each rank writes already: shards, and tensors of its own.
    """

    entries: Mapping[str, TensorEntry]
    holders: Mapping[str, Sequence[int]]
    loads: Sequence[int]


def _exchange_entries(shared: Mapping[str, TensorEntry], load: int, ranks: Ranks) -> _AllRanks:
    """Return the plain tensors of all ranks; collective."""
    facts = {name: [entry.dtype, list(entry.shape), entry.same_as] for name, entry in shared.items()}
    # A digest first: if all ranks have the same tensors, which is common, no list needs to be sent.
    digest = hashlib.blake2b(dump_json(facts), digest_size=16).hexdigest()
    messages = [parse_json(message) for message in ranks.exchange(dump_json([digest, load]))]
    loads = [load for _, load in messages]
    if all(other == digest for other, _ in messages):
        return _AllRanks(entries=shared, holders=dict.fromkeys(shared, range(ranks.size)), loads=loads)
    lists = _exchange_differences(facts, ranks)
    union = {
        name: TensorEntry(dtype=dtype, shape=tuple(shape), same_as=same_as)
        for listed in lists
        for name, (dtype, shape, same_as) in listed.items()
    }
    return _AllRanks(entries=union, holders=_holders_by_name(lists), loads=loads)


def _exchange_differences(facts: Mapping[str, Any], ranks: Ranks) -> list[dict[str, Any]]:
    """Return the dtype, shape and alias of each rank's tensors; collective."""
    # Rank 0 sends its list, and the others their differences from it: in most jobs rank 0 alone has the buffers, so
    # that there is a difference, and a small one.
    first: dict[str, Any] = parse_json(ranks.broadcast(dump_json(facts) if ranks.rank == 0 else b""))
    removed_numbers = [number for number, name in enumerate(first) if facts.get(name) != first[name]]
    added_facts = {name: fact for name, fact in facts.items() if first.get(name) != fact}
    lists = []
    for message in ranks.exchange(dump_json([removed_numbers, added_facts])):
        numbers, added = parse_json(message)
        removed = set(numbers)
        lists.append({name: fact for number, (name, fact) in enumerate(first.items()) if number not in removed})
        lists[-1].update(added)
    return lists


def _holders_by_name(lists: Sequence[Mapping[str, Any]]) -> dict[str, list[int]]:
    """Return the ranks that have each tensor; they differ between the stages of a pipeline."""
    holders: dict[str, list[int]] = {}
    for rank, facts in enumerate(lists):
        for name, fact in facts.items():
            same = holders.setdefault(name, [])
            if same and lists[same[0]][name] != fact:
                (one_dtype, one_shape, _), (dtype, shape, _) = lists[same[0]][name], fact
                raise CheckpointError(
                    f"tensor {name!r} is {one_dtype} of shape {tuple(one_shape)} on rank {same[0]}, and {dtype} of "
                    f"shape {tuple(shape)} on rank {rank}: a plain tensor must be the same on every rank, what "
                    "differs belongs under 'per_rank' or into a DTensor"
                )
            same.append(rank)
    return holders


def _assigned_payloads(layouts: Mapping[str, TensorLayout], all_ranks: _AllRanks, ranks: Ranks) -> list[Payload]:
    """Return the boxes of plain tensors that this rank writes."""
    boxes: list[tuple[int, str, int, int]] = []  # each of some rows: bytes, name, first row, number of rows
    for name, entry in all_ranks.entries.items():
        num_bytes = entry.num_bytes
        if entry.same_as is None and num_bytes:
            rows = entry.shape[0] if entry.shape else 1
            num_boxes = max(1, min(len(all_ranks.holders[name]), rows, num_bytes // _SPLIT_SIZE))
            step = -(-rows // num_boxes)
            sizes = [(first, min(step, rows - first)) for first in range(0, rows, step)]
            boxes += [(num_bytes // rows * size, name, first, size) for first, size in sizes]
    payloads: list[Payload] = []
    loads = list(all_ranks.loads)
    # One queue for each set of holders, so that a box costs the logarithm of their number.
    queues: dict[tuple[int, ...] | range, list[tuple[int, int]]] = {}
    # Every rank computes the same assignment: the largest box first, to the rank with the least load.
    for num_bytes, name, first, count in sorted(boxes, key=lambda box: (-box[0], box[1], box[2])):
        holders = all_ranks.holders[name]
        key = holders if isinstance(holders, range) else tuple(holders)
        if key not in queues:
            queues[key] = [(loads[rank], rank) for rank in key]
            heapq.heapify(queues[key])
        queue = queues[key]
        # Ranks got boxes from other queues meanwhile: an entry gets its present load when it comes first.
        while queue[0][0] != loads[queue[0][1]]:
            heapq.heapreplace(queue, (loads[queue[0][1]], queue[0][1]))
        writer = queue[0][1]
        loads[writer] += num_bytes
        if writer == ranks.rank:
            tensor = layouts[name].tensor.detach()
            box = tensor.narrow(0, first, count) if tensor.dim() else tensor
            starts = (first, *(0 for _ in tensor.shape[1:])) if tensor.dim() else ()
            payloads.append(Payload(name, LocalBox(tensor=box, starts=starts)))
    return payloads
