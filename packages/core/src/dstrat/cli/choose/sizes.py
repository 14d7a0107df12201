"""Sizes of a training for batches of any size: a few are measured, and others are on the line through them."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from dstrat.errors import DstratError
from dstrat.interfaces.memory import Work

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dstrat.interfaces.memory import TrainingSize

_MEASURED = 3
"""Number of sizes after which a line through the first two can be checked."""


class TrainingSizes:
    """Sizes of a training with one precision.

    A step on fake tensors takes seconds for a large model.  Bytes and operations of most models grow with the batch
    along a line: once three measured batches show that, no other is measured.  Batches of one sample are, as torch
    views tensors there that it copies otherwise.

    Args:
        measure: Returns the sizes for a batch size; None is the batch of the training.
        usual: Sizes of the same training whose layers save all activations.  What they compute again is the same, so
            that the third batch need not be measured if that of the usual ones was on the line.
    """

    def __init__(self, measure: Callable[[int | None], TrainingSize], usual: TrainingSizes | None = None) -> None:
        self._measure, self._usual = measure, usual
        self._measured: dict[int, TrainingSize] = {}
        self._compact: dict[int, TrainingSize] = {}
        self._errors: dict[int | None, DstratError] = {}  # of batches that cannot be measured
        self._default: TrainingSize | None = None
        self._is_checked = False

    @property
    def grows_along_line(self) -> bool:
        """Whether other batches are on the line through the first two that were measured."""
        several = self._several()
        if self._is_checked or self._usual is None or not self._usual.grows_along_line or len(several) != _MEASURED - 1:
            return self._is_checked
        return len(several[0].timeline) == len(several[1].timeline)

    def of_training(self) -> TrainingSize:
        """Return the sizes for the batch of the training."""
        if self._default is None:
            self._default = self._measure_once(None)
            self._add(self._default, self._default.batch_size)
        return self._default

    def of(self, batch_size: int) -> TrainingSize:
        """Return the sizes for a batch size, with the largest entries of its timeline only."""
        if batch_size not in self._compact:
            size = self._full_size(batch_size)
            self._compact[batch_size] = dataclasses.replace(size, timeline=largest_entries(size.timeline))
        return self._compact[batch_size]

    def _full_size(self, batch_size: int) -> TrainingSize:
        if batch_size in self._measured:
            return self._measured[batch_size]
        if self.grows_along_line and batch_size > 1:
            first, second, *_ = self._several()
            return _on_line(first, second, batch_size)
        size = self._measure_once(batch_size)
        self._add(size, batch_size)
        return size

    def _measure_once(self, batch_size: int | None) -> TrainingSize:
        if batch_size in self._errors:
            raise self._errors[batch_size]
        try:
            return self._measure(batch_size)
        except DstratError as error:
            self._errors[batch_size] = error
            raise

    def _add(self, size: TrainingSize, batch_size: int) -> None:
        self._measured[batch_size] = size
        several = self._several()
        if len(several) == _MEASURED:
            first, second, third = several
            self._is_checked = _is_on_line(first, second, third)

    def _several(self) -> list[TrainingSize]:
        # A training without tensors of samples has one size for all batches.
        return [size for batch_size, size in self._measured.items() if size.batch_size == batch_size > 1]


def largest_entries(timeline: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Return the entries of a timeline of which no other one has as much in both numbers.

    One of them is the largest for any layout, and there are hundreds rather than tens of thousands.
    """
    entries: list[tuple[int, int]] = []
    for activations, gradients in sorted(set(timeline), reverse=True):
        if not entries or gradients > entries[-1][1]:
            entries.append((activations, gradients))
    return tuple(entries)


def _is_on_line(first: TrainingSize, second: TrainingSize, third: TrainingSize) -> bool:
    if len({len(one.timeline) for one in (first, second, third)}) > 1:
        return False
    return _growing(_on_line(first, second, third.batch_size)) == _growing(third)


def _growing(size: TrainingSize) -> tuple[Any, ...]:
    return size.timeline, size.outputs, size.saved, size.offloaded_activations, size.work


def _on_line(first: TrainingSize, second: TrainingSize, batch_size: int) -> TrainingSize:
    """Return the sizes on the line through two others, of the same operations."""
    offset, distance = batch_size - first.batch_size, second.batch_size - first.batch_size

    def between(one: int, other: int) -> int:
        return one + (other - one) * offset // distance

    def of_layers(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
        return {name: between(value, other[name]) for name, value in one.items()}

    return dataclasses.replace(
        first,
        batch_size=batch_size,
        timeline=tuple(
            (between(activations, other), gradients)
            for (activations, gradients), (other, _) in zip(first.timeline, second.timeline, strict=True)
        ),
        outputs=of_layers(first.outputs, second.outputs),
        saved=of_layers(first.saved, second.saved),
        offloaded_activations=between(first.offloaded_activations, second.offloaded_activations),
        work=Work(
            flops=between(first.work.flops, second.work.flops),
            operands=between(first.work.operands, second.work.operands),
            moved=between(first.work.moved, second.work.moved),
            operations=first.work.operations,
        ),
    )
