"""The training loop: epochs, batches, and validation between them."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dstrat.training.data.batches import Batches, batch_mover
from dstrat.training.data.loaders import length_of, limit_of, prepare_training_loader
from dstrat.training.loops.interruption import Interruption
from dstrat.training.loops.optimization import AutomaticOptimization
from dstrat.training.loops.schedulers import step_schedulers
from dstrat.training.metrics.logged import LoggedValues

if TYPE_CHECKING:
    from dstrat.training.loops.evaluation_loop import EvaluationLoop
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


_log = logging.getLogger(__name__)


class FitLoop:
    """Trains a module over the batches of a loader, epoch after epoch.

    Attributes:
        epoch: Index of the epoch, from 0.
        epochs_done: Number of epochs whose batches have all been trained on.
        global_step: Number of optimizer steps taken.
        batch_idx: Index of the batch in the epoch.
        batches_seen: Number of batches trained on in all epochs.
        num_batches: Number of batches in an epoch, None where the loader has no length.
        logged: The values that the module logs while it trains.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.epoch = 0
        self.epochs_done = 0
        self.global_step = 0
        self.batch_idx = 0
        self.batches_seen = 0
        self.num_batches: int | None = None
        self.logged = LoggedValues(training=True)

    @property
    def finished(self) -> bool:
        """Whether the asked number of epochs or steps is done."""
        return self._epochs_done or self._steps_done

    @property
    def _epochs_done(self) -> bool:
        most = self._trainer.max_epochs
        return 0 <= most <= self.epochs_done

    @property
    def _steps_done(self) -> bool:
        return 0 <= self._trainer.max_steps <= self.global_step

    def run(self, module: TrainModule, loader: Any, validation: EvaluationLoop | None) -> None:
        """Train until the asked epochs or steps are done, or something asks to stop.

        Args:
            module: Set up by the strategy.
            loader: The user's training loader.
            validation: Runs at the interval that the Trainer was given; None never.
        """
        trainer = self._trainer
        self._module, self._validation = module, validation
        self._loader = prepare_training_loader(loader, trainer.strategy, distribute=trainer.use_distributed_sampler)
        self.num_batches = limit_of(trainer.limit_train_batches, length_of(self._loader), "limit_train_batches")
        self._validation_interval = trainer.validation_interval(self.num_batches)
        self._optimization = AutomaticOptimization(trainer, module)
        self._mover = batch_mover(trainer, module)
        trainer.logged = self.logged
        trainer.dispatch.call("on_train_start")
        _tell_of_evaluation_mode(module)
        with Interruption(trainer.strategy, self.batches_seen) as self._interruption:
            while not (self.finished or trainer.should_stop or self.num_batches == 0):
                self._run_epoch()
            self._interruption.conclude(self.batches_seen)
        trainer.dispatch.call("on_train_end")

    def _run_epoch(self) -> None:
        trainer, dispatch = self._trainer, self._trainer.dispatch
        _set_epoch(self._loader, self.epoch)
        self.logged.start_epoch()
        dispatch.call("on_train_epoch_start")
        self.logged.in_step = True
        completed = self._train_batches()
        self.logged.in_step = False
        if completed:
            self.epochs_done = self.epoch + 1
        trainer.publish_epoch(self.logged, dispatch.early("on_train_epoch_end"))
        if completed:
            step_schedulers(trainer, self._module, interval="epoch", count=self.epochs_done)
        for hook in dispatch.late("on_train_epoch_end"):
            hook()
        self.epoch = self.epochs_done

    def _train_batches(self) -> bool:
        """Train on the batches of an epoch; return whether it was not broken off.

        What is called per batch is looked up before the first.
        """
        trainer, logged, interruption = self._trainer, self.logged, self._interruption
        batch_start = trainer.dispatch.of("on_train_batch_start")
        batch_end = trainer.dispatch.of("on_train_batch_end")
        accumulate, optimize, move = trainer.accumulate_grad_batches, self._optimization.run, self._mover
        in_group = 0
        for batch_idx, (host_batch, is_last) in enumerate(Batches(self._loader, self.num_batches)):
            batch = move(host_batch, 0)
            self.batch_idx, logged.batch = batch_idx, batch
            if any([hook(batch, batch_idx) == -1 for hook in batch_start]):  # noqa: C419 - all of them are called
                break
            in_group += 1
            applies = in_group == accumulate or is_last
            group_size = accumulate if accumulate == 1 else self._group_size(batch_idx, accumulate)
            outputs, stepped = optimize(batch, batch_idx, group_size=group_size, applies=applies)
            in_group = 0 if applies else in_group
            self.batches_seen += 1
            if stepped:
                self._after_step()
            for hook in batch_end:
                hook(outputs, batch, batch_idx)
            if self._validation_is_due(batch_idx, is_last=is_last):
                self._validate()
            interruption.check(self.batches_seen)
            if self._steps_done or trainer.should_stop:
                return is_last
        return True

    def _group_size(self, batch_idx: int, accumulate: int) -> int:
        """Return the number of batches in this one's group; the last group of an epoch may have fewer."""
        if self.num_batches is None:
            return accumulate
        start = batch_idx - batch_idx % accumulate
        return min(accumulate, self.num_batches - start)

    def _after_step(self) -> None:
        trainer = self._trainer
        self.global_step += 1
        if trainer.strategy.lr_schedulers:
            step_schedulers(trainer, self._module, interval="step", count=self.global_step)
        if trainer.loggers and self.global_step % trainer.log_every_n_steps == 0:
            trainer.publish_step(self.logged)

    def _validation_is_due(self, batch_idx: int, *, is_last: bool) -> bool:
        if self._validation is None:
            return False
        if (self.epoch + 1) % self._trainer.check_val_every_n_epoch != 0:
            return False
        interval = self._validation_interval
        return is_last if interval is None else (batch_idx + 1) % interval == 0

    def _validate(self) -> None:
        assert self._validation is not None  # noqa: S101 - it is due only when there is one
        self._validation.run()
        self._trainer.logged = self.logged

    def state_dict(self) -> dict[str, int]:
        """Return the counters for a checkpoint."""
        return {"epochs_done": self.epochs_done, "global_step": self.global_step, "batches_seen": self.batches_seen}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take back the counters."""
        self.epoch = self.epochs_done = state["epochs_done"]
        self.global_step = state["global_step"]
        self.batches_seen = state["batches_seen"]


def _set_epoch(loader: Any, epoch: int) -> None:
    """Tell the sampler which epoch comes, where it wants to know."""
    batches = getattr(loader, "batch_sampler", None)
    for target in (getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)):
        if target is not None and hasattr(target, "set_epoch"):
            target.set_epoch(epoch)


def _tell_of_evaluation_mode(module: TrainModule) -> None:
    """Log that parts of the module, or all of it, stay as in evaluation: such as layers that the user has frozen."""
    modes = [part.training for part in module.modules()]
    if not all(modes):
        _log.warning(
            "%d of %d modules are in evaluation mode and stay so while training: call train() on those that should not",
            modes.count(False),
            len(modes),
        )
