"""Interface of profilers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import wraps
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from dstrat.checkpoint.paths import home_path
from dstrat.checkpoint.portable.storage import LocalStorage
from dstrat.errors import RequestError
from dstrat.interfaces.keywords import NamedArguments
from dstrat.interfaces.retired_members import RetiredMembers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager
    from pathlib import Path

R = TypeVar("R")


def writable_folder(dirpath: str | Path | None, log_dir: Path) -> Path:
    """Return the folder of a profiler's files, checked before the run, as they are written at its end.

    Raises:
        RequestError: It is not writable.
    """
    folder = home_path(dirpath or log_dir)
    reason = LocalStorage().why_not_writable(folder)
    if reason is not None:
        raise RequestError(
            f"the profiler's files cannot be written to {str(folder)!r}, as {reason}: pass it another dirpath"
        )
    return folder


class Profiler(NamedArguments, RetiredMembers, ABC):
    """Measurement of the actions of a run, by their names.

    A run wraps its functions when it looks them up, so that it costs nothing without a profiler.  The calls in each
    process, in this order::

        profiler.start("fit", log_dir, rank)
        hook = profiler.timed("ModelCheckpoint.on_train_batch_end", hook)
        training_step = profiler.timed("Strategy.training_step", strategy.training_step)
        next_batch = profiler.timed("next_batch", iterator.__next__)
        for ...:
            next_batch(), training_step(...), hook(...)
            profiler.step()
        profiler.finish()  # also after an exception; callbacks are torn down before, so that bars are closed

    Actions may be nested: an optimizer's step contains the training step.  A module measures its own actions in
    ``with self.trainer.profiler.profile("loss"):``.  The smallest complete subclass::

        class Announcing(Profiler):
            def profile(self, name):
                print(name)
                return nullcontext()
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        "stop": "override profile(name), whose context is the time of an action",
        "summary": "override totals() for the times of the actions, and finish() for a text of them",
        "describe": "override finish()",
        "setup": "override start(stage, log_dir, rank)",
        "teardown": "override finish()",
    }

    @abstractmethod
    def profile(self, name: str) -> AbstractContextManager[Any]:
        """Return a context whose time counts for an action."""

    def timed(self, name: str, function: Callable[..., R]) -> Callable[..., R]:
        """Return a wrapped function whose calls count for an action."""
        profile = self.profile

        @wraps(function)
        def timed_function(*args: Any, **kwargs: Any) -> R:
            with profile(name):
                return function(*args, **kwargs)

        return timed_function

    def start(self, stage: str, log_dir: Path, rank: int) -> None:
        """Start the measurement in this process.

        Args:
            stage: fit, validate, test or predict.
            log_dir: Folder for files, the same for all ranks.
            rank: The global rank of this process.
        """

    def step(self) -> None:
        """Count a batch: a training batch in a fit, otherwise a batch of the evaluation."""

    def totals(self) -> dict[str, float]:
        """Return the seconds of each action since the start, without its nested actions; empty if it has no times."""
        return {}

    def finish(self) -> None:
        """Stop the measurement, and print or write the results."""
