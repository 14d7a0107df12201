"""dstrat's Trainer under the names and with the values of Lightning's, for modules and callbacks."""

from __future__ import annotations

import math
import sys
from functools import cache
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from dstrat.errors import MisuseError
from dstrat_lightning.callbacks import lightning_callback
from dstrat_lightning.loggers import lightning_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat import Trainer

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


class TrainerView:
    """Trainer of a LightningModule or a Lightning callback.

    Attributes that both Trainers have are those of dstrat's, also when they are set; the properties here are those that
    differ.  What dstrat's Trainer does not have is an AttributeError that names it.
    """

    __slots__ = ("_trainer",)
    _trainer: Trainer

    def __init__(self, trainer: Trainer) -> None:
        object.__setattr__(self, "_trainer", trainer)  # self._trainer = ... would set it on the Trainer

    def __getattr__(self, name: str) -> Any:
        trainer = self._trainer
        # Not hasattr(trainer, name), which would run a property, and hide the AttributeError of one that fails.
        if hasattr(type(trainer), name) or name in vars(trainer):
            return getattr(trainer, name)
        raise AttributeError(
            f"dstrat's Trainer has no attribute {name!r}: where a module or callback needs that of Lightning's, run it "
            "with Lightning's Trainer and strategy='dstrat_...' (import dstrat_lightning)"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        if isinstance(getattr(TrainerView, name, None), property):
            object.__setattr__(self, name, value)
        else:
            setattr(self._trainer, name, value)

    def __eq__(self, other: object) -> bool:
        # A new view is made for each call of a hook, and programs compare trainers.
        return (other._trainer if isinstance(other, TrainerView) else other) is self._trainer

    def __hash__(self) -> int:
        return hash(self._trainer)

    def __reduce__(self) -> tuple[type[TrainerView], tuple[Trainer]]:
        return TrainerView, (self._trainer,)

    # Infinite numbers instead of None

    @property
    def num_training_batches(self) -> float:
        """Number of training batches in an epoch."""
        return _number(self._trainer.num_training_batches)

    @property
    def num_val_batches(self) -> list[float]:
        """Number of batches of each validation loader."""
        return _numbers(self._trainer.num_val_batches)

    @property
    def num_sanity_val_batches(self) -> list[float]:
        """Number of batches of each validation loader in the sanity check."""
        return _numbers(self._trainer.num_sanity_val_batches)

    @property
    def num_test_batches(self) -> list[float]:
        """Number of batches of each test loader."""
        return _numbers(self._trainer.num_test_batches)

    @property
    def num_predict_batches(self) -> list[float]:
        """Number of batches of each prediction loader."""
        return _numbers(self._trainer.num_predict_batches)

    @property
    def enable_validation(self) -> bool:
        """Whether the fit validates."""
        sources = self._trainer.run.sources
        return sources is not None and self._trainer.limit_val_batches != 0 and sources.validates()

    # Paths as texts

    @property
    def default_root_dir(self) -> str:
        """The default folder of logs and checkpoints."""
        return str(self._trainer.default_root_dir)

    @property
    def log_dir(self) -> str:
        """The folder of the first logger, or else of the run."""
        return str(self._trainer.log_dir)

    # Objects of Lightning, as the user passed them

    @property
    def strategy(self) -> Any:
        """The strategy, which counts as an instance of Lightning's class of the same name."""
        return StrategyView(self._trainer.strategy)

    @property
    def loggers(self) -> list[Any]:
        """All loggers."""
        return [lightning_logger(logger) for logger in self._trainer.loggers]

    @loggers.setter
    def loggers(self, loggers: Any) -> None:
        self._trainer.logger = loggers or None

    @property
    def logger(self) -> Any:
        """The first logger, None without one."""
        return next(iter(self.loggers), None)

    @logger.setter
    def logger(self, logger: Any) -> None:
        self._trainer.logger = logger

    @property
    def callbacks(self) -> list[Any]:
        """All callbacks."""
        return [lightning_callback(callback) for callback in self._trainer.callbacks]

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """The callbacks that save checkpoints."""
        return [lightning_callback(callback) for callback in self._trainer.checkpoint_callbacks]

    @property
    def checkpoint_callback(self) -> Any:
        """The first callback that has a best checkpoint."""
        return lightning_callback(self._trainer.checkpoint_callback)

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Every ``EarlyStopping``, Lightning's too."""
        return [c for c in self.callbacks if any(base.__name__ == "EarlyStopping" for base in type(c).__mro__)]

    @property
    def early_stopping_callback(self) -> Any:
        """The first of them, None without one."""
        return next(iter(self.early_stopping_callbacks), None)

    @property
    def distributed_sampler_kwargs(self) -> Any:
        """Arguments of distributed samplers."""
        return self._trainer.strategy.distributed_sampler_kwargs

    @property
    def fit_loop(self) -> Any:
        """The counters of the fit that Lightning's users read."""
        return FitLoopView(self._trainer)

    def save_checkpoint(self, filepath: Any, weights_only: bool | None = False, storage_options: Any = None) -> None:
        """Write a checkpoint; every process calls it.

        Raises:
            MisuseError: There are options of storage.
        """
        if storage_options is not None:
            raise MisuseError(
                f"dstrat's Trainer has no save_checkpoint(storage_options={storage_options!r}): leave it out, and pass "
                "such options to a CheckpointIO in Trainer(plugins=...)"
            )
        self._trainer.save_checkpoint(filepath, weights_only=bool(weights_only))


class StrategyView:
    """Strategy of a run, for ``isinstance`` also one of Lightning's class of the same name.

    Libraries ask ``isinstance(trainer.strategy, DDPStrategy)`` to reduce values over ranks, or to log on rank 0 only.
    Everything else is the strategy's.
    """

    __slots__ = ("_strategy",)
    _strategy: Any

    def __init__(self, strategy: Any) -> None:
        object.__setattr__(self, "_strategy", strategy)

    @property
    def __class__(self) -> type:  # isinstance asks it, and the strategy of dstrat stays its own class too
        loaded = [sys.modules[f"{name}.strategies"] for name in _PACKAGES if f"{name}.strategies" in sys.modules]
        ours: Any = type(self._strategy)
        return _class_of_both(ours, *loaded)

    @__class__.setter
    def __class__(self, cls: type) -> None:
        raise AttributeError("the class of a strategy cannot be changed")

    @property
    def lightning_module(self) -> Any:
        """The user's module."""
        return self._strategy.module

    def __getattr__(self, name: str) -> Any:
        strategy = self._strategy
        if hasattr(type(strategy), name) or name in vars(strategy):  # as of the Trainer
            return getattr(strategy, name)
        raise _missing("strategy", name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._strategy, name, value)

    def __eq__(self, other: object) -> bool:
        return (other._strategy if type(other) is StrategyView else other) is self._strategy

    def __hash__(self) -> int:
        return hash(self._strategy)

    def __reduce__(self) -> tuple[type[StrategyView], tuple[Any]]:
        return StrategyView, (self._strategy,)


@cache
def _class_of_both(ours: Any, *libraries: Any) -> type:
    """Return a class that derives from a strategy's class, and from each of Lightning's of the same name."""
    theirs = []
    for library in libraries:
        # A class of an author of strategies has no counterpart, but its base may.
        named = (getattr(library, base.__name__, None) for base in ours.__mro__)
        theirs += [cls for cls in named if isinstance(cls, type)][:1]
    return type(ours.__name__, (ours, *theirs), {"__module__": ours.__module__})


class FitLoopView:
    """Counters of a fit by the names of Lightning's loop."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def max_epochs(self) -> int:
        """Number of epochs."""
        return self._trainer.max_epochs

    @property
    def epoch_loop(self) -> Any:
        """The counters within an epoch."""
        loop = self._trainer.fit_loop
        sources = self._trainer.run.sources
        # Libraries ask it before they choose what a scheduler monitors, as Lightning has no public name for it then.
        has_validation = SimpleNamespace(is_defined=lambda: sources is not None and sources.has("val"))
        batches = SimpleNamespace(ready=loop.batches_done + 1, completed=loop.batches_done, processed=loop.batches_done)
        return EpochLoopView(
            global_step=loop.global_step,
            batch_idx=loop.batch_idx,
            total_batch_idx=loop.batches_seen - 1,
            max_steps=self._trainer.max_steps,
            batch_progress=SimpleNamespace(current=batches, is_last_batch=loop.is_last_batch),
            _batches_that_stepped=loop.global_step,
            val_loop=SimpleNamespace(_data_source=has_validation),
        )

    def __getattr__(self, name: str) -> Any:
        loop = self._trainer.fit_loop
        if hasattr(loop, name):
            return getattr(loop, name)
        raise _missing("fit_loop", name)


class EpochLoopView(SimpleNamespace):
    """Counters within an epoch by the names of Lightning's loop."""

    def __getattr__(self, name: str) -> Any:
        raise _missing("fit_loop.epoch_loop", name)


def _missing(owner: str, name: str) -> AttributeError:
    return AttributeError(
        f"the {owner} of dstrat's Trainer has no attribute {name!r}: where a module or callback needs that of "
        "Lightning's, run it with Lightning's Trainer and strategy='dstrat_...' (import dstrat_lightning)"
    )


def _number(count: int | None) -> float:
    return math.inf if count is None else count


def _numbers(counts: Sequence[int | None]) -> list[float]:
    return [_number(count) for count in counts]
