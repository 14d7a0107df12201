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
    return [_memory_of_stage(training, layout, stage, len(stages), saved) for stage in stages]


def _memory_of_stage(training: TrainingSize, layout: MemoryLayout, stage: Stage, count: int, saved: int) -> RankMemory:
    """Return the memory of the ranks of a stage.

    Args:
        training: Sizes of the training on one device.
        layout: Memory of a rank if all stages had equal layers.
        stage: The stage.
        count: Number of stages.
        saved: Bytes of activations that the layers of all stages save.
    """
    layers = [training.module.get_submodule(name) for name in stage.layers]
    held, all_of_them = _numbers_of_elements(layers), _numbers_of_elements([training.module])
    # Sizes of the stage as multiples of the mean: frozen layers have no gradients and no state.
    size, trained = (count * of_stage / max(total, 1) for of_stage, total in zip(held, all_of_them, strict=True))
    sizes: dict[str, Any] = {name: int(size * getattr(layout, name)) for name in ("parameters", "host")}
    for name in ("gradients", "optimizer_state", "optimizer_temporaries", "accumulated"):
        sizes[name] = int(trained * getattr(layout, name))
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


def _numbers_of_elements(layers: Iterable[Module]) -> tuple[int, int]:
    """Return the number of elements of the layers' parameters, and of those that are trained."""
    parameters = {parameter for layer in layers for parameter in layer.parameters()}
    return sum(one.numel() for one in parameters), sum(one.numel() for one in parameters if one.requires_grad)
