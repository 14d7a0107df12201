"""Restoration of a run from a checkpoint, saved on any number of ranks."""

from __future__ import annotations

import logging
import warnings
from functools import partial
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.foreign import how_to_convert
from dstrat.checkpoint.formats import io_for, portable_io
from dstrat.checkpoint.paths import shown_path
from dstrat.checkpoint.portable.memory_files import is_in_memory
from dstrat.checkpoint.strategy_state import (
    CURRENT_WEIGHTS,
    JobSize,
    describe_move,
    is_of_same_strategy,
    job_sizes,
    load_module,
    load_rank_buffers,
    load_weights_into,
    read_values,
    restore_optimization,
    state_to_follow,
)
from dstrat.data.resume import shared_seeds
from dstrat.errors import CheckpointError
from dstrat.training.loops.position import Position, reshard_rank_states

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.optimizers import SchedulerConfig
    from dstrat.training.run import Run


_BATCHES_DROPPED = (
    "was saved between the batches of one optimizer step, which are left out, as their gradients cannot be taken"
)
_GRADIENTS_DROPPED = "has gradients that the module had not cleared, which are left out, as they cannot be taken"

_OTHER_JOB = "the state of another job"

_log = logging.getLogger(__name__)


class CheckpointRestore:
    """A checkpoint to restore, read and passed to ``on_load_checkpoint`` before optimizers exist; collective.

    Args:
        run: In a run with a configured module, before the strategy's setup.
        path: The checkpoint.

    Raises:
        CheckpointError: The checkpoint cannot be read, or is not a checkpoint of a training.
    """

    def __init__(self, run: Run, path: str | Path) -> None:
        from dstrat.training.checkpoint.lightning import LightningFileIO, is_lightning_file  # imports this module

        self._run, self._path = run, path
        self._io = LightningFileIO() if is_lightning_file(path) else _io_of(run, path)
        self._values = read_values(run.strategy, self._io, path)
        run.hooks.call("on_load_checkpoint", self._values)

    def finish(self) -> None:
        """Load the module's state, and in a fit optimizers, schedulers and counters; collective.

        To be called after the strategy's setup.

        Raises:
            CheckpointError: The checkpoint does not fit this training.
        """
        run = self._run
        resumes_average = run.is_fitting and CURRENT_WEIGHTS in self._values
        checkpoint = load_module(
            run.strategy,
            self._io,
            self._path,
            self._values,
            has_optimizers=run.is_fitting,
            key=CURRENT_WEIGHTS if resumes_average else "state_dict",
        )
        if resumes_average:
            load_average = partial(load_weights_into, run.strategy, self._io, self._path, self._values)
            for callback in run.callbacks:
                callback.restore_average(run.trainer, load_average)
        _restore_states(run, checkpoint)
        if run.is_fitting:
            self._restore_training(checkpoint)
        elif run.final_state is not None:
            run.final_state = run.final_state.with_weights_of(self._path, run.stage)

    def _restore_training(self, checkpoint: Mapping[str, Any]) -> None:
        """Resume from the checkpoint: exactly on as many ranks and readers of the data, approximately on others."""
        if "own_loop" in checkpoint:
            raise CheckpointError(
                f"{str(self._path)!r} was saved by OwnLoop.save_checkpoint, and a Trainer cannot continue that loop: "
                "use OwnLoop.load_checkpoint, or load the weights into the module and call fit without ckpt_path"
            )
        if "loops" not in checkpoint:
            raise CheckpointError(
                f"{str(self._path)!r} has weights only, and cannot continue a training: "
                "load the weights into the module, and call fit without ckpt_path"
            )
        if "dstrat_checkpoint_version" not in checkpoint:
            raise CheckpointError(f"{str(self._path)!r} was written by another program: {how_to_convert(self._path)}")
        run = self._run
        # Stepped before the optimizers' states are loaded, as steps change these; the rates are set afterwards.
        if "converted_from" in checkpoint and not checkpoint["lr_schedulers"]:
            schedulers = SteppedSchedulers(run, checkpoint["loops"])
            restore_optimization(run.strategy, {**checkpoint, "lr_schedulers": schedulers.states}, self._path)
            schedulers.set_rates()
        else:
            restore_optimization(run.strategy, checkpoint, self._path)
        run.fit_loop.load_state_dict(checkpoint["loops"])
        run.metrics.load_state_dict(checkpoint["metrics"])
        if "converted_from" in checkpoint:
            self._log_conversion(checkpoint["converted_from"])
            return
        saved, now = job_sizes(run.strategy, checkpoint)
        if saved == now:
            self._restore_rank(checkpoint)
        else:
            self._reshard(checkpoint, saved, now)

    def _restore_rank(self, checkpoint: Mapping[str, Any]) -> None:
        run, ranks = self._run, checkpoint.get("ranks", [])
        rank_state = ranks[run.strategy.global_rank] if ranks else checkpoint.get("per_rank")
        takes_state = is_of_same_strategy(run.strategy, checkpoint)
        takes_gradients = (
            takes_state and rank_state is not None and run.strategy.takes_gradients(rank_state["strategy"])
        )
        dropped = _describe_dropped(checkpoint, rank_state, takes_gradients=takes_gradients)
        if rank_state is None:
            self._log_summary(f"one of {run.world_size} processes alone", rank_state, dropped)
            return
        followed = state_to_follow(run.strategy, self._io, self._path, ranks, rank_state)
        run.fit_loop.load_rank_state(followed)
        load_rank_buffers(run.strategy, followed.get("buffers", {}))  # absent in older checkpoints
        if takes_state:
            run.strategy.load_rank_state(rank_state["strategy"])
        # A decision of all ranks: one may have no shard of any gradient, and another one has.
        if run.strategy.reduce_boolean_decision(bool(dropped)):
            run.fit_loop.drop_gradients()
            if run.is_global_zero:
                _log.warning("%s %s", self._path, dropped)

    def _reshard(self, checkpoint: Mapping[str, Any], saved: JobSize, now: JobSize) -> None:
        """Restore the state that a job of another size had, as far as it is independent of that."""
        run = self._run
        ranks = checkpoint.get("ranks") or self._saved_ranks(saved.world_size)
        run.fit_loop.pending.readers = (saved.readers, now.readers)
        first = ranks[0] if ranks else None
        if ranks:
            run.fit_loop.load_rank_state(reshard_rank_states(ranks))
        dropped = _describe_dropped(checkpoint, first)
        if dropped:
            run.fit_loop.drop_gradients()
        self._log_summary(describe_move(saved, now), first, dropped)

    def _log_summary(self, how: str, rank_state: Mapping[str, Any] | None, dropped: str) -> None:
        """Log which state is restored, and which is not."""
        run = self._run
        if run.is_global_zero:
            _log.warning(
                "%s was saved by %s: weights, optimizer and counters are the same; random numbers and running means "
                "start anew, and the data resumes at the %s%s",
                shown_path(self._path),
                how,
                f"beginning of epoch {run.fit_loop.epoch}" if rank_state is None else "same part of the epoch",
                f"; it {dropped}" if dropped else "",
            )

    def _saved_ranks(self, saved_by: int) -> list[dict[str, Any]]:
        """Return the states of the ranks that saved; without accumulated gradients that of rank 0 only."""
        # Of other ranks only accumulated gradients are needed, which are averaged.
        first = self._io.load_rank(self._path, 0)
        if first is None:
            return []
        other_ranks = range(1, saved_by) if first["gradients"] else ()
        loaded = (self._io.load_rank(self._path, rank) for rank in other_ranks)
        return [first, *(state for state in loaded if state is not None)]

    def _log_conversion(self, source: str) -> None:
        if self._run.is_global_zero:
            _log.warning(
                "%s comes from %s: weights, optimizers, schedulers and counters resume; random numbers start anew, and "
                "the data resumes at the beginning of epoch %d",
                self._path,
                source,
                self._run.fit_loop.epoch,
            )


def _io_of(run: Run, path: str | Path) -> CheckpointIO:
    """Return the checkpoint io that reads a checkpoint; collective with several machines."""
    io = run.strategy.checkpoint_io
    if run.plan.num_nodes > 1 and is_in_memory(path) and (portable := portable_io(io)) is not None:
        from dstrat.checkpoint.portable.mirrored import MirroredCheckpointIO

        return MirroredCheckpointIO(portable.machines(portable.ranks()), verify=portable.verify)
    return io_for(path, io)


def _describe_dropped(
    checkpoint: Mapping[str, Any], rank_state: Mapping[str, Any] | None, *, takes_gradients: bool = False
) -> str:
    """Return the end of a log message about gradients that are not restored; empty if there are none.

    Args:
        checkpoint: The checkpoint.
        rank_state: The state of a rank; None if it is not known.
        takes_gradients: Whether the strategy restores the gradients in that state.
    """
    # Only strategies with ``saves_gradients`` have gradients in their rank state.
    has_saved_gradients = rank_state is not None and bool(rank_state["strategy"].get("gradients"))
    if (rank_state is not None and rank_state["gradients"] is not None) or (has_saved_gradients and takes_gradients):
        return ""
    if checkpoint["loops"]["in_group"] > 0:
        return _BATCHES_DROPPED
    # In manual optimization gradients may remain after a complete step.
    return _GRADIENTS_DROPPED if has_saved_gradients else ""


def _restore_states(run: Run, checkpoint: Mapping[str, Any]) -> None:
    """Load the states of callbacks and data module, also for an evaluation: some average weights, or split data."""
    states = checkpoint.get("callbacks", {})
    for callback in run.called_callbacks:
        if callback.state_key in states:  # a callback that is new since the checkpoint starts anew
            callback.load_state_dict(states[callback.state_key])
    if run.datamodule is not None and "datamodule" in checkpoint:
        run.datamodule.load_state_dict(checkpoint["datamodule"])


# The state of a running training, which jobs that train together exchange in memory


class LiveTraining:
    """The training of this process, as :class:`~dstrat.interfaces.strategy.RunningTraining`.

    It has what a checkpoint has that is continued by another number of ranks: random numbers and running means of
    logged values belong to a process, and start anew.

    Args:
        run: In a fit, after the strategy's setup; of a strategy that replicates the state.
    """

    def __init__(self, run: Run) -> None:
        self._run = run

    def capture(self) -> dict[str, Any]:
        """Return the state; no collective, so that a single rank of a job can be captured."""
        run, loop = self._run, self._run.fit_loop
        strategy, beginning = run.strategy, loop.data.reader.beginning
        return {
            "state_dict": strategy.module.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in strategy.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in strategy.lr_schedulers],
            "precision": strategy.precision_plugin.state_dict(),
            "strategy": {"name": type(strategy).__name__, "state": strategy.state_dict()},
            "loops": loop.state_dict(),
            "callbacks": {callback.state_key: callback.state_dict() for callback in run.callbacks},
            "datamodule": run.datamodule.state_dict() if run.datamodule else {},
            "order": {
                "generators": [] if beginning is None else beginning.generators,
                "beginning": None if beginning is None else beginning.state_dict(),
                "validation": [shared_seeds(loader) for loader in loop.validation_loaders],
            },
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Load a state of another job, before the first batch."""
        run, loop = self._run, self._run.fit_loop
        run.strategy.load_module_state_dict(state["state_dict"])
        _restore_states(run, state)
        restore_optimization(run.strategy, state, _OTHER_JOB)
        loop.load_state_dict(state["loops"])
        if state["order"]["beginning"] is not None:  # None before the first epoch
            of_this_process = dict.fromkeys(("random", "device_random", "logged", "place", "gradients"))
            loop.group_weight = 0  # without gradients
            loop.load_rank_state({**of_this_process, **state["order"]})


# Defaults for a converted checkpoint


def training_entries(*, epochs_done: int, global_step: int, batches_seen: int) -> dict[str, Any]:
    """Return the entries of a checkpoint from which a fit resumes at the beginning of an epoch, without logged values.

    Args:
        epochs_done: Number of completed epochs.
        global_step: Number of optimizer steps taken.
        batches_seen: Number of batches trained on in all epochs.
    """
    counters = {"epochs_done": epochs_done, "global_step": global_step, "steps_before": global_step}
    return {
        "precision": {},
        "loops": {**Position().state_dict(), **counters, "batches_seen": batches_seen, "loader_length": None},
        "metrics": {"values": {}, "shown": [], "written": []},
    }


class SteppedSchedulers:
    """Schedulers without a state in a converted checkpoint, stepped as often as the checkpoint's counters say.

    Schedulers that monitor a value, and all in manual optimization, start anew: the number of their steps is unknown.

    Args:
        run: In a fit after the strategy's setup, before the optimizers are loaded.
        loops: The counters of the checkpoint.

    Attributes:
        states: The states of the schedulers after these steps.
    """

    def __init__(self, run: Run, loops: Mapping[str, Any]) -> None:
        self._module, configs = run.module, run.strategy.lr_schedulers
        self._stepped = [c for c in configs if c.monitor is None and self._module.automatic_optimization]
        for config in self._stepped:
            self._step(config, loops["global_step" if config.interval == "step" else "epochs_done"])
        self.states: list[dict[str, Any]] = [config.scheduler.state_dict() for config in configs]
        if run.is_global_zero:
            self._log_summary(configs, loops)

    def _step(self, config: SchedulerConfig, count: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*lr_scheduler.step")  # "before optimizer.step()", intended here
            for _ in range(count // config.frequency):
                self._module.lr_scheduler_step(config.scheduler, None)

    def set_rates(self) -> None:
        """Set the optimizers' learning rates to the schedulers'; the loaded state has those of the other program."""
        for config in self._stepped:
            scheduler = config.scheduler
            if hasattr(scheduler, "optimizer") and hasattr(scheduler, "get_last_lr"):
                for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                    group["lr"] = rate

    def _log_summary(self, configs: list[SchedulerConfig], loops: Mapping[str, Any]) -> None:
        for config in configs:
            stepped = any(config is other for other in self._stepped)
            where = f"is where it would be after {loops['global_step']} steps and {loops['epochs_done']} epochs"
            name = type(config.scheduler).__name__
            _log.warning("no state of schedulers was converted: %s %s", name, where if stepped else "begins anew")
