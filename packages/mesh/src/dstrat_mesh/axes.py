"""Axes of a mesh: their sizes, and the groups of ranks along them."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR, EXPERT = "pp", "dp_replicate", "dp_shard", "cp", "tp", "ep"

_MEANINGS = {
    PIPELINE: "stages of the model",
    REPLICATE: "replicas of the shards",
    SHARD: "shards of parameters, gradients and optimizer state",
    CONTEXT: "parts of sequences",
    TENSOR: "parts of split layers",
    EXPERT: "parts of the experts, which exchange their tokens",
}
_MICROBATCHES = 4  # of each stage, so that a fifth of the time is idle
_STAGES = (2, 4, 8)  # of a rank
_MICROBATCH_COUNTS = (1, 2, 4, 8)  # of each stage
_OF_SCHEDULE = ("schedule", "stages_per_rank", "microbatches")
_MOST_GROUPS = 8  # in a row of the plan
_MOST_RANKS = 64  # of a job whose groups are shown in full
_FEW_GROUPS, _FEW_RANKS = 2, 4  # of a larger one


@dataclass(frozen=True, kw_only=True, slots=True)
class Axes:
    """Sizes of a mesh, the outermost axis first: neighbouring ranks split layers.

    Attributes:
        pp: Number of stages of a pipeline.
        dp_replicate: Number of replicas, which read different batches.
        dp_shard: Number of ranks that share the state of a replica, and read different batches.
        cp: Number of ranks that divide the sequences of a batch.
        tp: Number of ranks that split layers, and read the same batch.
        ep: Number of ranks that divide experts: neighbours along ``dp_shard``, ``cp`` and ``tp``, so that it is no
            factor of the number of ranks.
    """

    pp: int
    dp_replicate: int
    dp_shard: int
    cp: int
    tp: int
    ep: int = 1

    @classmethod
    @functools.cache
    def of(
        cls, world_size: int, *, pp: int, dp_replicate: int, dp_shard: int | str, cp: int, tp: int, ep: int = 1
    ) -> Axes:
        """Return the axes of a number of processes; ``dp_shard="auto"`` is what the others leave.

        Raises:
            RequestError: Their product is not the number of processes, or ``ep`` does not fit the others.
        """
        rest = pp * dp_replicate * cp * tp
        requested = {PIPELINE: pp, REPLICATE: dp_replicate, SHARD: dp_shard, CONTEXT: cp, TENSOR: tp}
        sizes = [f"{name}={size}" for name, size in requested.items() if size not in (1, "auto")]
        product = " * ".join(sizes) or f"{SHARD}=1"
        if dp_shard == "auto":
            if world_size % rest:
                raise RequestError(
                    f"{product} does not divide the {world_size} processes: {rest} must divide their number, "
                    f"such as {rest} or {2 * rest} devices"
                )
            dp_shard = world_size // rest
        axes = cls(pp=pp, dp_replicate=dp_replicate, dp_shard=int(dp_shard), cp=cp, tp=tp, ep=ep)
        if math.prod(axes.shape) != world_size:
            fits = f", or dp_shard={world_size // rest}" if world_size % rest == 0 else ""
            raise RequestError(
                f"{product} is a mesh of {math.prod(axes.shape)} processes, and the job has {world_size}: ask for "
                f"{math.prod(axes.shape)} devices{fits}"
            )
        axes._check_experts()
        return axes

    def _check_experts(self) -> None:
        ranks = self.dp_shard * self.cp * self.tp
        if ranks % self.ep or (self.ep > 1 and self.ep % self.tp):
            fitting = [size for size in range(2, ranks + 1) if ranks % size == 0 and size % self.tp == 0]
            advice = f"choose ep={' or '.join(map(str, fitting))}" if fitting else "leave ep out"
            reason = (
                f"does not divide the {ranks} ranks of dp_shard * cp * tp (a replica, or its stage)"
                if ranks % self.ep
                else f"is no multiple of tp={self.tp}, whose ranks have the same tokens"
            )
            raise RequestError(f"ep={self.ep} {reason}: {advice}")

    @property
    def options(self) -> dict[str, Any]:
        """The constructor's options for these sizes; ``dp_shard`` is what the others leave."""
        sizes = zip((*self.names, EXPERT), (*self.shape, self.ep), strict=True)
        return {name: size for name, size in sizes if size > 1 and name != SHARD}

    def schedules(self, num_layers: int) -> list[dict[str, Any]]:
        """Return the options for these sizes with each schedule of a pipeline that is worth comparing.

        Fewer microbatches are for batches that do not divide into as many as a short bubble needs, and several stages
        on a rank shorten it.  The more of them, the shorter, and activations take no more memory.

        Args:
            num_layers: Number of layers of the pipeline, each stage of which needs one.
        """
        if self.pp == 1:
            return [self.options]
        stages = max((count for count in _STAGES if count * self.pp <= num_layers), default=1)
        several = {"schedule": "Interleaved1F1B", "stages_per_rank": stages}
        return [
            {**self.options, "microbatches": microbatches, **schedule}
            for microbatches in (_MICROBATCHES * self.pp, self.pp)
            for schedule in ([{}, several] if stages > 1 else [{}])
        ]

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The sizes in the order of :attr:`names`."""
        return self.pp, self.dp_replicate, self.dp_shard, self.cp, self.tp

    @property
    def names(self) -> tuple[str, str, str, str, str]:
        """The names of the axes, the outermost first."""
        return PIPELINE, REPLICATE, SHARD, CONTEXT, TENSOR

    @property
    def mesh(self) -> dict[str, int]:
        """Names and sizes of the dimensions of the device mesh.

        Ranks that divide sequences are shards too: their gradients are summed as those of other batches.
        """
        return {
            PIPELINE: self.pp,
            REPLICATE: self.dp_replicate,
            SHARD: self.dp_shard * self.cp,
            TENSOR: self.tp,
        }

    @property
    def mesh_of_experts(self) -> dict[str, int]:
        """Names and sizes of the dimensions of the mesh of experts, which has the same ranks in the same order."""
        shards = self.dp_shard * self.cp * self.tp // self.ep
        return {PIPELINE: self.pp, REPLICATE: self.dp_replicate, SHARD: shards, EXPERT: self.ep}

    def groups(self, name: str) -> list[list[int]]:
        """Return the ranks of each group along an axis."""
        if name == EXPERT:
            world = range(math.prod(self.shape))
            return [list(world[first : first + self.ep]) for first in world[:: self.ep]]
        position = self.names.index(name)
        stride = math.prod(self.shape[position + 1 :])
        size = self.shape[position]
        first = (rank for rank in range(math.prod(self.shape)) if rank // stride % size == 0)
        return [[rank + stride * step for step in range(size)] for rank in first]

    def rows(self, ranks_per_machine: int) -> list[tuple[str, str, str]]:
        """Return the rows of the plan: the mesh, and the groups along each axis that has more than one rank.

        Args:
            ranks_per_machine: Number of ranks of each machine.
        """
        used = [(name, size) for name, size in zip(self.names, self.shape, strict=True) if size > 1]
        mesh = " x ".join(f"{name} {size}" for name, size in used) or "one process"
        rows = [("mesh", mesh, "the outermost axis first")]
        names = [name for name, _ in used] + ([EXPERT] if self.ep > 1 else [])
        for name in names:
            groups = self.groups(name)
            rows.append((f"  {name}", _shown(groups), f"{_MEANINGS[name]}{_scope(groups, ranks_per_machine)}"))
        return rows


def layouts(world_size: int, ranks_per_machine: int, num_experts: int = 1) -> list[Axes]:
    """Return the meshes of a number of processes whose split layers and divided sequences stay in a machine.

    Their communication is the most, and waits.  Sizes divide the number of processes.

    Args:
        world_size: Number of processes.
        ranks_per_machine: Number of them on each machine.
        num_experts: Number of experts of each layer that has some; each size that divides it is an ``ep``.
    """
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    dense = [
        Axes(pp=pp, dp_replicate=dp_replicate, dp_shard=rest // dp_replicate, cp=cp, tp=tp)
        for tp in divisors
        for cp in divisors
        if ranks_per_machine % (tp * cp) == 0
        for pp in divisors
        if world_size % (tp * cp * pp) == 0 and (rest := world_size // (tp * cp * pp))
        for dp_replicate in divisors
        if rest % dp_replicate == 0
    ]
    # With replicas each rank would have more experts, and gather them from fewer.
    divided = [
        dataclasses.replace(axes, ep=ep)
        for axes in dense
        if axes.dp_replicate == 1
        for ep in divisors[1:]
        if num_experts % ep == 0 and axes.dp_shard * axes.cp * axes.tp % ep == 0 and ep % axes.tp == 0
    ]
    return dense + divided


def similar_schedules(options: Mapping[str, Any], num_layers: int) -> list[dict[str, Any]]:
    """Return options of the same mesh with other numbers of microbatches and other schedules of a pipeline.

    Args:
        options: The options of the strategy.
        num_layers: Number of layers of the pipeline, each stage of which needs one.
    """
    ranks = options.get(PIPELINE, 1)
    if ranks == 1:
        return []
    same = {name: value for name, value in options.items() if name not in _OF_SCHEDULE}
    stages = [count for count in _STAGES if count * ranks <= num_layers]
    schedules: list[dict[str, Any]] = [
        {},
        *({"schedule": "Interleaved1F1B", "stages_per_rank": count} for count in stages),
        *({"schedule": "InterleavedZeroBubble", "stages_per_rank": count} for count in (1, *stages[:1])),
    ]
    return [
        {**same, "microbatches": count * ranks, **schedule} for count in _MICROBATCH_COUNTS for schedule in schedules
    ]


def checked_size(name: str, value: Any, *, or_auto: bool = False) -> Any:
    """Return the size of an axis.

    Raises:
        RequestError: It is no positive number.
    """
    if (or_auto and value == "auto") or (type(value) is int and value > 0):
        return value
    raise RequestError(f"{name}={value!r} is not a positive number{' or ' + repr('auto') if or_auto else ''}")


def _shown(groups: Sequence[Sequence[int]]) -> str:
    if sum(map(len, groups)) > _MOST_RANKS:
        texts = [_group_text(group) for group in groups[:_FEW_GROUPS]]
    else:
        texts = [str(group) for group in groups[:_MOST_GROUPS]]
    return " ".join(texts) + (f" and {len(groups) - len(texts)} more" if len(groups) > len(texts) else "")


def _group_text(group: Sequence[int]) -> str:
    return str(group) if len(group) <= _FEW_RANKS else f"[{group[0]}, {group[1]}, ..., {group[-1]}]"


def _scope(groups: Sequence[Sequence[int]], ranks_per_machine: int) -> str:
    """Return a clause that says whether groups are inside a machine, in a job of several."""
    ranks = sum(map(len, groups))
    if ranks <= ranks_per_machine:
        return ""
    inside = all(group[0] // ranks_per_machine == group[-1] // ranks_per_machine for group in groups)
    return ", inside a machine" if inside else ", between machines"
