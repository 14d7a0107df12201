"""The status of a Trainer, by Lightning's names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class _Text(str, Enum):
    """Constants that are their texts, so that either may be compared."""

    def __str__(self) -> str:
        return str(self.value)


class TrainerStatus(_Text):
    """How far a Trainer is with what was called last."""

    INITIALIZING = "initializing"
    RUNNING = "running"
    FINISHED = "finished"
    INTERRUPTED = "interrupted"

    @property
    def stopped(self) -> bool:
        """Whether it has ended, well or not."""
        return self in (TrainerStatus.FINISHED, TrainerStatus.INTERRUPTED)


class TrainerFn(_Text):
    """What was called last."""

    FITTING = "fit"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"


class RunningStage(_Text):
    """What a Trainer does at this moment: a fit trains, and validates in between."""

    TRAINING = "train"
    SANITY_CHECKING = "sanity_check"
    VALIDATING = "validate"
    TESTING = "test"
    PREDICTING = "predict"

    @property
    def evaluating(self) -> bool:
        """Whether that is a validation, also one that is only tried, or a test."""
        return self in (RunningStage.VALIDATING, RunningStage.TESTING, RunningStage.SANITY_CHECKING)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerState:
    """What ``trainer.state`` was when it was asked for.

    Attributes:
        status: How far the Trainer is.
        fn: What was called last; None before.
        stage: What it does at this moment; None where it does nothing.
    """

    status: TrainerStatus
    fn: TrainerFn | None
    stage: RunningStage | None

    @property
    def finished(self) -> bool:
        """Whether what was called last has come to its end."""
        return self.status is TrainerStatus.FINISHED

    @property
    def stopped(self) -> bool:
        """Whether it has ended, well or not."""
        return self.status.stopped
