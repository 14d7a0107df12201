"""Schedules of a pipeline: the order of forward and backward passes on each rank."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from dstrat.errors import ConflictError, RequestError
from dstrat_mesh.axes import checked_size

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_ONE_STAGE, _SEVERAL_STAGES = ("1F1B", "GPipe"), ("Interleaved1F1B", "LoopedBFS")
_ALL_FORWARD_FIRST = ("GPipe", "LoopedBFS")
_REFUSED = ("zerobubble", "zbv", "dualpipe")


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward or backward pass of a rank.

    Attributes:
        chunk: Which stage of the rank computes.
        microbatch: Index of the microbatch.
        is_backward: Whether it is a backward pass.
    """

    chunk: int
    microbatch: int
    is_backward: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Order of the passes of a batch.

    Stage ``s`` is on rank ``s % ranks``.  ``1F1B`` (Narayanan et al. 2019, https://arxiv.org/abs/1806.03377) and
    ``GPipe`` (Huang et al. 2019, https://arxiv.org/abs/1811.06965) have a stage on each rank.  ``Interleaved1F1B``
    (Narayanan et al. 2021, https://arxiv.org/abs/2104.04473) and ``LoopedBFS`` (Lamy-Poirier 2022,
    https://arxiv.org/abs/2211.05953) have several, which shorten the bubble.

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
        if name == "Interleaved1F1B" and number % ranks:
            raise RequestError(
                f"microbatches={number} is no multiple of pp={ranks}, and schedule='Interleaved1F1B' computes {ranks} "
                f"microbatches in each of its stages in turn: choose {number + -number % ranks}, or 'LoopedBFS'"
            )
        return cls(name=name, ranks=ranks, stages_per_rank=count, microbatches=number)

    def __str__(self) -> str:
        stages = f", {self.stages_per_rank} stages per rank" if self.stages_per_rank > 1 else ""
        return f"{self.name}{stages}, {self.microbatches} microbatches"

    @property
    def num_stages(self) -> int:
        """Number of stages of all ranks."""
        return self.ranks * self.stages_per_rank

    @property
    def bubble(self) -> float:
        """The share of time in which a rank is idle, if all passes of a microbatch take the same time."""
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
        size = self.microbatches if self.name in _ALL_FORWARD_FIRST else self.ranks
        chunks, total = range(self.stages_per_rank), self.microbatches * self.stages_per_rank
        # Each stage of a rank computes a group of microbatches before the next one does.
        groups = [range(first, min(first + size, self.microbatches)) for first in range(0, self.microbatches, size)]
        forward = [Pass(chunk, index, False) for group in groups for chunk in chunks for index in group]
        backward = iter(Pass(chunk, index, True) for group in groups for chunk in reversed(chunks) for index in group)
        ahead = total if self.name in _ALL_FORWARD_FIRST else self._num_ahead(rank)
        for number, following in enumerate(forward):
            yield following
            if number >= ahead:
                yield next(backward)
        yield from backward

    def _num_ahead(self, rank: int) -> int:
        """Return the number of forward passes before the first one that a backward pass follows."""
        # The last rank's first backward pass needs a group of microbatches in all of its stages but the last; of the
        # ranks before it, each is a pass ahead of the next one, in both directions where stages are interleaved.
        distance = self.ranks - 1 - rank
        return distance if self.stages_per_rank == 1 else 2 * distance + (self.stages_per_rank - 1) * self.ranks


@cache  # of a few schedules, which many layouts have
def _held_microbatches(schedule: Schedule, rank: int) -> frozenset[tuple[int, ...]]:
    """Return how many microbatches each stage of a rank holds, whenever a backward pass is about to free one."""
    held, counts = [0] * schedule.stages_per_rank, set()
    for one in schedule.passes(rank):
        if one.is_backward:
            counts.add(tuple(held))
        held[one.chunk] += -1 if one.is_backward else 1
    return frozenset(counts)


def _check_name(name: str) -> None:
    names = (*_ONE_STAGE, *_SEVERAL_STAGES)
    if name in names:
        return
    possible = ", ".join(map(repr, names))
    if any(word in str(name).lower() for word in _REFUSED):
        raise RequestError(
            f"schedule={name!r} computes gradients of weights without autograd's hooks, by which the sharding of each "
            f"stage takes them, also where it has one rank (pytorch issue 144530): choose among {possible}"
        )
    raise RequestError(f"schedule={name!r} is not known: choose among {possible}")
