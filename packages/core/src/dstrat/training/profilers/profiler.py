"""The interface to what measures where the time of a run goes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager
    from pathlib import Path

R = TypeVar("R")


class Profiler(ABC):
    """What measures the actions of a run, each under its name.

    Whoever runs a stage wraps the functions that it calls when it looks them up, so that without a profiler nothing is
    paid.  In each process, in this order::

        profiler.start("fit", log_dir, rank)
        hook = profiler.timed("ModelCheckpoint.on_train_batch_end", hook)
        training_step = profiler.timed("Strategy.training_step", strategy.training_step)
        next_batch = profiler.timed("next_batch", iterator.__next__)
        for ...:
            next_batch(), training_step(...), hook(...)
            profiler.step()
        profiler.finish()  # also after an exception; callbacks are torn down before, so that bars are closed

    Actions may be nested: an optimizer's step contains the training step.  A module measures parts of its own with
    ``with self.trainer.profiler.profile("loss"):``.  The smallest complete subclass::

        class Announcing(Profiler):
            def profile(self, name):
                print(name)
                return nullcontext()
    """

    @abstractmethod
    def profile(self, name: str) -> AbstractContextManager[Any]:
        """Return a context whose time counts for an action."""

    def timed(self, name: str, function: Callable[..., R]) -> Callable[..., R]:
        """Return a function that does the same, and whose calls count for an action."""
        profile = self.profile

        @wraps(function)
        def timed_function(*args: Any, **kwargs: Any) -> R:
            with profile(name):
                return function(*args, **kwargs)

        return timed_function

    def start(self, stage: str, log_dir: Path, rank: int) -> None:
        """Begin to measure, in one process.

        Args:
            stage: fit, validate, test or predict.
            log_dir: Where files may be written; the same folder for all ranks.
            rank: The global rank of this process.
        """

    def step(self) -> None:
        """Take note that a batch is done: a training batch in a fit, one of the evaluation elsewhere."""

    def finish(self) -> None:
        """Stop to measure, and show or write what was found."""
