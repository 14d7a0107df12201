"""Memory of the ranks of a job, of which some may have other layers than others."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.errors import DstratError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.interfaces.memory import MemoryLayout, TrainingSize
    from dstrat.interfaces.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class RankMemory:
    """Memory of some ranks with the same layers.

    Attributes:
        layers: Names of the layers; empty for all.
        ranks: The ranks.
        memory: What each of them holds.
        activations: Largest memory of its activations, in bytes.
        host: Its memory on the host, in bytes.
        peak: Largest memory of its device, in bytes.
    """

    layers: tuple[str, ...]
    ranks: Sequence[int]
    memory: MemoryLayout
    activations: int
    host: int
    peak: int


def memory_of_ranks(strategy: Strategy, training: TrainingSize) -> list[RankMemory]:
    """Return the memory of the ranks, one entry for those with the same layers; none where it is not known.

    Args:
        strategy: The strategy.
        training: Sizes of the training on one device, and the ranks that are to share it.
    """
    layout = strategy.memory_layout(training)
    if layout is None:
        return []
    try:
        stages = strategy.stages(training)
    except DstratError:  # which check_training raises too
        stages = ()
    if not stages:
        return [_rank_memory(training, layout, (), range(training.world_size))]
    return [_rank_memory(training, stage.memory, stage.layers, stage.ranks) for stage in stages]


def host_of_machine(of_ranks: Sequence[RankMemory], ranks_per_machine: int) -> int:
    """Return what the ranks of a machine have on its host, in bytes; of the machine whose ranks have most.

    Args:
        of_ranks: Memory of all ranks.
        ranks_per_machine: Number of ranks on each machine.
    """
    sums: Counter[int] = Counter()
    for one in of_ranks:
        if one.host:
            for machine, ranks in Counter(rank // ranks_per_machine for rank in one.ranks).items():
                sums[machine] += ranks * one.host
    return max(sums.values(), default=0)


def _rank_memory(
    training: TrainingSize, layout: MemoryLayout, layers: tuple[str, ...], ranks: Sequence[int]
) -> RankMemory:
    return RankMemory(
        layers=layers,
        ranks=ranks,
        memory=layout,
        activations=int(layout.activation_share * training.activations),
        host=training.host(layout),
        peak=training.peak(layout),
    )
