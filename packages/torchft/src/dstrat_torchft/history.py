"""History of the replicated state: its identity, and which of two states the groups train on with."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

_TIES = 10**7  # states of one step and as many participants are told apart by the rest of their digest
_MOST_PARTICIPANTS = 499
_STEP = 2 * (_MOST_PARTICIPANTS + 1) * _TIES


@dataclass(frozen=True, kw_only=True, slots=True)
class History:
    """Identity of the replicated state: the steps that it results from, each with the quorum that completed it.

    A step count is none: if a connection is lost at the end of a step, two groups can complete it in two quorums, with
    different gradients.

    Attributes:
        step: Number of completed steps.
        num_participants: Number of groups in the quorum of the latest step.
        digest: Hash over the quorums of all steps; hexadecimal.
        previous: The digest before the latest step.
        has_begun: Whether the state is that of a training, not of a group that waits for the others before its first
            step; not saved.
    """

    step: int = 0
    num_participants: int = 0
    digest: str = "0"
    previous: str = ""
    has_begun: bool = False

    @classmethod
    def of_first_values(cls, group: int) -> History:
        """Return the history of a group's first values; among these, those of the lowest number count."""
        return cls(digest=f"{_TIES - 1 - group:x}")

    @classmethod
    def load(cls, state: Mapping[str, Any]) -> History:
        """Return a history from :meth:`state_dict`; a checkpoint without a digest has that of all such checkpoints."""
        return cls(
            **{name: state[name] for name in ("step", "num_participants", "digest", "previous") if name in state}
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the identity, for a checkpoint."""
        return {
            "step": self.step,
            "num_participants": self.num_participants,
            "digest": self.digest,
            "previous": self.previous,
        }

    @property
    def version(self) -> int:
        """A number that differs if the identity does, and is the highest for the state that all groups take.

        The state with the most steps counts, of these that with the most participants, and then that of a training.
        """
        members = 2 * min(self.num_participants, _MOST_PARTICIPANTS) + self.has_begun
        return self.step * _STEP + members * _TIES + int(self.digest, 16) % _TIES

    def begin(self) -> History:
        """Return the same history, of a training."""
        return replace(self, has_begun=True)

    def take_step(self, quorum: str, num_participants: int) -> History:
        """Return the history after a further step.

        Args:
            quorum: Name of the quorum that has completed it, the same in all of its groups, and in no other quorum.
            num_participants: Number of its groups.
        """
        digest = hashlib.sha256(f"{self.digest} {quorum} {num_participants}".encode()).hexdigest()[:32]
        return History(
            step=self.step + 1,
            num_participants=num_participants,
            digest=digest,
            previous=self.digest,
            has_begun=True,
        )

    def follows(self, other: History) -> bool:
        """Return whether this state results from another one by a single step."""
        return self.step == other.step + 1 and self.previous == other.digest
