"""Schedules of a pipeline: the order of forward and backward passes on each rank."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache
from typing import TYPE_CHECKING

from dstrat.errors import ConflictError, RequestError
from dstrat_mesh.axes import checked_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ZERO_BUBBLE = "InterleavedZeroBubble"
_ONE_STAGE, _SEVERAL_STAGES = ("1F1B", "GPipe"), ("Interleaved1F1B", "LoopedBFS", _ZERO_BUBBLE)
_ALL_FORWARD_FIRST = ("GPipe", "LoopedBFS")
_IN_GROUPS = ("Interleaved1F1B", _ZERO_BUBBLE)  # of as many microbatches as ranks
_V_PLACEMENT = ("zbv", "dualpipe")


class PassKind(Enum):
    """What a pass computes."""

    FORWARD = "forward"
    BACKWARD = "backward"  # of weights too, where the schedule has no passes for them
    WEIGHTS = "weights"


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass of a rank over a microbatch.

    Attributes:
        chunk: Which stage of the rank computes.
        microbatch: Index of the microbatch.
        kind: What it computes.
    """

    chunk: int
    microbatch: int
    kind: PassKind


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Order of the passes of a batch.

    Stage ``s`` is on rank ``s % ranks``.  ``1F1B`` (Narayanan et al. 2019, https://arxiv.org/abs/1806.03377) and
    ``GPipe`` (Huang et al. 2019, https://arxiv.org/abs/1811.06965) have a stage on each rank.  ``Interleaved1F1B``
    (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473) and ``LoopedBFS`` (Lamy-Poirier 2022,
    https://arxiv.org/abs/2211.05953) have several, which shorten the bubble.  ``InterleavedZeroBubble`` (ZB-H1 of Qi et
    al. 2023, https://arxiv.org/abs/2401.10241) has any number of them, and divides a backward pass into two: other
    ranks wait for the gradients of inputs only, and those of weights are computed when a rank would be idle.

    Attributes:
        name: The name in torch.
        ranks: Number of ranks.
        stages_per_rank: Number of stages of each rank.
        microbatches: Number of microbatches of a batch.
    """

    name: str
    ranks: int
    stages_per_rank: int
    microbatches: int

    @classmethod
    def of(cls, name: str, ranks: int, stages_per_rank: int | None, microbatches: int | None) -> Schedule:
        """Return a schedule; None is 2 stages for a rank where there are several, and as many microbatches as ranks.

        Raises:
            RequestError: There is no such schedule, it is not offered, or the numbers do not fit it.
        """
        _check_name(name)
        if name in _ONE_STAGE and stages_per_rank not in (None, 1):
            raise ConflictError(
                f"schedule={name!r} has one stage for each rank, and stages_per_rank={stages_per_rank!r} asks for "
                f"more: choose {' or '.join(map(repr, _SEVERAL_STAGES))}"
            )
        usual = 1 if name in _ONE_STAGE else 2
        count = checked_size("stages_per_rank", usual if stages_per_rank is None else stages_per_rank)
        number = ranks if microbatches is None else checked_size("microbatches", microbatches)
        if name in _IN_GROUPS and count > 1 and number % ranks:
            raise RequestError(
                f"microbatches={number} is no multiple of pp={ranks}, and schedule={name!r} computes {ranks} "
                f"microbatches in each of its stages in turn: choose {number + -number % ranks}, or 'LoopedBFS'"
            )
        return cls(name=name, ranks=ranks, stages_per_rank=count, microbatches=number)

    def __str__(self) -> str:
        stages = f", {self.stages_per_rank} stages per rank" if self.stages_per_rank > 1 else ""
        return f"{self.name}{stages}, {self.microbatches} microbatches"

    def of_batch(self, size: int) -> Schedule:
        """Return the schedule of a batch with a number of samples, with fewer microbatches if these are not enough."""
        if size >= self.microbatches:
            return self
        if self.name not in _IN_GROUPS or self.stages_per_rank == 1:
            return replace(self, microbatches=max(size, 1))
        if size < self.ranks:
            return replace(self, name="LoopedBFS", microbatches=max(size, 1))
        return replace(self, microbatches=size - size % self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks."""
        return self.ranks * self.stages_per_rank

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights have passes of their own."""
        return self.name == _ZERO_BUBBLE

    @property
    def bubble(self) -> float:
        """The share of time in which a rank is idle, if all passes of a microbatch take the same time."""
        if self.splits_backward:
            return 1 - 3 * self.microbatches * self.stages_per_rank / _orders(self).num_slots
        return (self.ranks - 1) / (self.microbatches * self.stages_per_rank + self.ranks - 1)

    @property
    def activation_share(self) -> float:
        """The largest share of a batch's activations on the first rank, which holds those of most microbatches."""
        return self.batch_share(0, [1] * self.stages_per_rank) / self.ranks

    def batch_share(self, rank: int, saved: Sequence[int]) -> float:
        """Return the largest share of a batch whose activations a rank holds at one time, of its stages.

        Args:
            rank: Position of the rank.
            saved: Bytes of activations of a batch that each of its stages saves.
        """
        largest = max(
            sum(count * size for count, size in zip(held, saved, strict=True))
            for held in _held_microbatches(self, rank)
        )
        return largest / max(self.microbatches * sum(saved), 1)

    def passes(self, rank: int) -> Iterator[Pass]:
        """Yield the passes of a rank in their order.

        All ranks have the same order of their forward passes, and of their backward passes, so that messages between
        two ranks are received in the order in which they are sent.
        """
        if self.splits_backward:
            yield from _orders(self).passes[rank]
            return
        forward = _passes_in_order(self, PassKind.FORWARD)
        backward = iter(_passes_in_order(self, PassKind.BACKWARD))
        ahead = len(forward) if self.name in _ALL_FORWARD_FIRST else _num_ahead(self, rank)
        for number, following in enumerate(forward):
            yield following
            if number >= ahead:
                yield next(backward)
        yield from backward


def _passes_in_order(schedule: Schedule, kind: PassKind) -> list[Pass]:
    """Return the passes of a kind in the order of every rank."""
    size = schedule.microbatches if schedule.name in _ALL_FORWARD_FIRST else schedule.ranks
    chunks = list(range(schedule.stages_per_rank))
    if kind is not PassKind.FORWARD:
        chunks.reverse()
    # Each stage of a rank computes a group of microbatches before the next one does.
    firsts = range(0, schedule.microbatches, size)
    groups = [range(first, min(first + size, schedule.microbatches)) for first in firsts]
    return [Pass(chunk, index, kind) for group in groups for chunk in chunks for index in group]


def _num_ahead(schedule: Schedule, rank: int) -> int:
    """Return the number of forward passes before the first one that a backward pass follows."""
    # The last rank's first backward pass needs a group of microbatches in all of its stages but the last; of the
    # ranks before it, each is a pass ahead of the next one, in both directions where stages are interleaved.
    ranks, per_rank = schedule.ranks, schedule.stages_per_rank
    distance = ranks - 1 - rank
    return distance if per_rank == 1 else 2 * distance + (per_rank - 1) * ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class _Orders:
    """Orders of passes in which those of weights fill what would be idle.

    Attributes:
        passes: Those of each rank.
        num_slots: The time until the last rank has done its last one, if each takes 1.
    """

    passes: tuple[tuple[Pass, ...], ...]
    num_slots: int


@cache  # of a few schedules, which many layouts have
def _orders(schedule: Schedule) -> _Orders:
    """Return the orders that result if each rank computes what it can, and what other ranks wait for first.

    No rank holds the activations of more microbatches than the first one does in 1F1B: where it would, the gradients of
    weights free some before its next forward pass.
    """
    ranks, last = schedule.ranks, schedule.num_stages - 1
    most = _num_ahead(schedule, 0) + 1
    forward = [deque(_passes_in_order(schedule, PassKind.FORWARD)) for _ in range(ranks)]
    backward = [deque(_passes_in_order(schedule, PassKind.BACKWARD)) for _ in range(ranks)]
    weights: list[deque[Pass]] = [deque() for _ in range(ranks)]
    passes: list[list[Pass]] = [[] for _ in range(ranks)]
    follows_backward = [False] * ranks
    held, done, num_slots = [0] * ranks, set[tuple[int, int, PassKind]](), 0

    def can_begin(rank: int, step: Pass) -> bool:
        stage, index = step.chunk * ranks + rank, step.microbatch
        if step.kind is PassKind.FORWARD:
            return held[rank] < most and (stage == 0 or (stage - 1, index, step.kind) in done)
        if stage == last:
            return (stage, index, PassKind.FORWARD) in done
        return (stage + 1, index, step.kind) in done

    while any((*forward, *backward, *weights)):
        begun = []
        for rank in range(ranks):
            # Forward and backward passes take turns where both can begin: other ranks wait for either.
            turns = (forward, backward) if follows_backward[rank] else (backward, forward)
            step = next(
                (queue[rank].popleft() for queue in turns if queue[rank] and can_begin(rank, queue[rank][0])), None
            )
            if step is None and not weights[rank]:
                continue
            if step is None:
                step = weights[rank].popleft()
                held[rank] -= 1
            elif step.kind is PassKind.FORWARD:
                follows_backward[rank] = False
                held[rank] += 1
            else:
                follows_backward[rank] = True
                weights[rank].append(Pass(step.chunk, step.microbatch, PassKind.WEIGHTS))
            passes[rank].append(step)
            begun.append((step.chunk * ranks + rank, step.microbatch, step.kind))
        assert begun  # noqa: S101 - the first rank's limit lets each backward pass begin
        done.update(begun)
        num_slots += 1
    return _Orders(passes=tuple(map(tuple, passes)), num_slots=num_slots)


@cache
def _held_microbatches(schedule: Schedule, rank: int) -> frozenset[tuple[int, ...]]:
    """Return how many microbatches each stage of a rank holds, whenever a pass is about to free one."""
    frees = PassKind.WEIGHTS if schedule.splits_backward else PassKind.BACKWARD
    held, counts = [0] * schedule.stages_per_rank, set()
    for one in schedule.passes(rank):
        if one.kind is frees:
            counts.add(tuple(held))
            held[one.chunk] -= 1
        elif one.kind is PassKind.FORWARD:
            held[one.chunk] += 1
    return frozenset(counts)


@cache
def numbers_of_passes(schedule: Schedule, rank: int) -> dict[Pass, int]:
    """Return the passes of a rank that have messages, with their numbers in its order."""
    with_messages = (step for step in schedule.passes(rank) if step.kind is not PassKind.WEIGHTS)
    return {step: number for number, step in enumerate(with_messages)}


def _check_name(name: str) -> None:
    names = (*_ONE_STAGE, *_SEVERAL_STAGES)
    if name in names:
        return
    possible = ", ".join(map(repr, names))
    if any(word in str(name).lower() for word in _V_PLACEMENT):
        raise RequestError(
            f"schedule={name!r} has the first and the last stage on one rank, and here stage s is on rank s % pp: "
            f"choose schedule={_ZERO_BUBBLE!r}, which fills idle time with gradients of weights too"
        )
    raise RequestError(f"schedule={name!r} is not known: choose among {possible}")
