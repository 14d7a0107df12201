"""Memory of the ranks of a job, of which some may have other layers than others."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.errors import DstratError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch.nn import Module

    from dstrat.interfaces.memory import MemoryLayout, Stage, TrainingSize
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
    saved = sum(training.saved.get(name, 0) for stage in stages for name in stage.layers)
    of_stages = [[training.module.get_submodule(name) for name in stage.layers] for stage in stages]
    total = _numel([training.module])
    return [
        _memory_of_stage(training, layout, stage, saved, len(stages) * _numel(layers) / max(total, 1))
        for stage, layers in zip(stages, of_stages, strict=True)
    ]


def _memory_of_stage(training: TrainingSize, layout: MemoryLayout, stage: Stage, saved: int, size: float) -> RankMemory:
    """Return the memory of the ranks of a stage.

    Args:
        training: Sizes of the training on one device.
        layout: Memory of a rank if all stages had equal layers.
        stage: The stage.
        saved: Bytes of activations that the layers of all stages save.
        size: Number of its parameters' elements, as a multiple of the mean of the stages.
    """
    names = ("parameters", "gradients", "optimizer_state", "optimizer_temporaries", "accumulated", "host")
    sizes: dict[str, Any] = {name: int(size * getattr(layout, name)) for name in names}
    share = sum(training.saved.get(name, 0) for name in stage.layers) / max(saved, 1)
    of_stage = dataclasses.replace(layout, **sizes, activation_share=stage.batch_share * share)
    return _rank_memory(training, of_stage, stage.layers, stage.ranks)


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


def _numel(layers: Iterable[Module]) -> int:
    return sum(parameter.numel() for parameter in {one for layer in layers for one in layer.parameters()})
