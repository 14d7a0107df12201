"""Communication of an optimizer step: collectives of a rank with their bytes and groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CollectiveKind = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "reduce", "broadcast", "send"]
"""Kind of a collective; a gather to one rank and a scatter from one count as ``"broadcast"``, ``"send"`` is between
two ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collective:
    """Equal collectives of a rank in an optimizer step.

    Attributes:
        kind: The kind.
        bytes: Bytes of all of them together, each counted as its full tensor: what ``all_gather`` returns,
            ``reduce_scatter`` takes, and a rank holds in the other kinds.
        messages: Number of them; the mean of many steps, where not every step has them.
        ranks: Number of ranks of the group.
        stride: Distance between neighbouring ranks of the group: 1 if they are neighbours in the job.
        overlaps: Whether computation goes on beside them, as in the backward pass beside reductions of gradients.
        in_each_batch: Whether a part of them is in each batch of the step; otherwise they are in the last one.
    """

    kind: CollectiveKind
    bytes: int
    messages: float
    ranks: int
    stride: int = 1
    overlaps: bool = False
    in_each_batch: bool = False

    @property
    def sent(self) -> float:
        """Bytes that a rank sends, by the algorithms that need least: rings, and one tensor for the others."""
        if self.ranks == 1:
            return 0.0
        share = (self.ranks - 1) / self.ranks
        factors = {"all_reduce": 2 * share, "reduce": 1.0, "broadcast": 1.0, "send": 1.0}
        return factors.get(self.kind, share) * self.bytes

    def crosses_machines(self, ranks_per_machine: int) -> bool:
        """Return whether some group of these has ranks on several machines, each of which has so many ranks."""
        return self.ranks > 1 and ranks_per_machine % (self.stride * self.ranks) != 0

    def ranks_on_a_machine(self, ranks_per_machine: int) -> int:
        """Return the number of ranks that each machine has of a group that is on several: 1 unless it has as many."""
        spanned = self.stride * self.ranks
        return max(1, ranks_per_machine // self.stride) if spanned % ranks_per_machine == 0 else 1

    def share_between_machines(self, ranks_per_machine: int) -> float:
        """Return the share of what a rank sends that goes to another machine, the mean of the ranks of a group."""
        if not self.crosses_machines(ranks_per_machine):
            return 0.0
        neighbours = self.ranks_on_a_machine(ranks_per_machine)
        if self.kind == "all_to_all":
            return (self.ranks - neighbours) / (self.ranks - 1)
        return 1 / neighbours  # around a ring, the last of each machine sends to the next one


@dataclass(frozen=True, kw_only=True, slots=True)
class CommunicationLayout:
    """What a rank communicates in an optimizer step, and how much of a batch it computes.

    Attributes:
        collectives: The collectives.
        ranks_per_batch: Number of ranks that share a batch, and divide its computation.
        operation_share: Share of a batch's operations that a rank begins: 1 if it computes a part of each, and more if
            it does so for several microbatches.
        passes: Number of parts of a batch that a rank computes one after the other, each with all of its weights.
        weight_share: Share of the weights with which a rank computes.
        activation_share: Share of the bytes of a batch's activations that a rank reads and writes; None for an equal
            part of each of ``ranks_per_batch``.
        copied: Bytes that a rank reads and writes to pack, scale and unpack tensors of collectives.
        copied_from_host: Bytes that a rank copies between host and device for collectives, besides two copies of what
            it has on the host, such as shards for further gathers and gradients of further batches.
        allocated: Bytes of memory that a rank allocates anew in a step, and writes to.
        hooks: What the strategy does in Python in a step, as the number of layers whose plain hooks take as long.
        idle: Share of the time in which a rank waits for others besides, such as the bubble of a pipeline.
        assumption: A clause that holds only in some trainings; shown to users.
    """

    collectives: tuple[Collective, ...] = ()
    ranks_per_batch: int = 1
    operation_share: float = 1.0
    passes: int = 1
    weight_share: float = 1.0
    activation_share: float | None = None
    copied: int = 0
    copied_from_host: int = 0
    allocated: int = 0
    hooks: int = 0
    idle: float = 0.0
    assumption: str = ""
