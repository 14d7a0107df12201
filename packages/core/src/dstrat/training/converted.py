"""Defaults for a checkpoint of another program that a fit resumes from."""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from dstrat.training.loops.position import Position

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.optimization import SchedulerConfig
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


def training_entries(*, epochs_done: int, global_step: int, batches_seen: int) -> dict[str, Any]:
    """Return the entries of a checkpoint that lead a fit to the beginning of an epoch, with nothing logged yet.

    Args:
        epochs_done: Number of epochs whose batches have all been trained on.
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
    """Schedulers that a converted checkpoint has no state of, stepped to where they would be after its steps.

    Those that watch a value, and all in manual optimization, begin anew: nobody knows when they were stepped.

    Args:
        trainer: In a fit whose strategy has set up, before the optimizers are loaded.
        loops: The counters of the checkpoint.

    Attributes:
        states: What the schedulers say of themselves then.
    """

    def __init__(self, trainer: Trainer, loops: Mapping[str, Any]) -> None:
        assert trainer.module is not None  # noqa: S101 - there is one in every run
        self._module, configs = trainer.module, trainer.strategy.lr_schedulers
        self._stepped = [c for c in configs if c.monitor is None and self._module.automatic_optimization]
        for config in self._stepped:
            self._step(config, loops["global_step" if config.interval == "step" else "epochs_done"])
        self.states: list[dict[str, Any]] = [config.scheduler.state_dict() for config in configs]
        if trainer.is_global_zero:
            self._tell(configs, loops)

    def _step(self, config: SchedulerConfig, count: int) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*lr_scheduler.step")  # before optimizer.step(), which is meant
            for _ in range(count // config.frequency):
                self._module.lr_scheduler_step(config.scheduler, None)

    def set_rates(self) -> None:
        """Give the optimizers, whose state has the learning rates of the other program, those of the schedulers."""
        for config in self._stepped:
            scheduler = config.scheduler
            if hasattr(scheduler, "optimizer") and hasattr(scheduler, "get_last_lr"):
                for group, rate in zip(scheduler.optimizer.param_groups, scheduler.get_last_lr(), strict=True):
                    group["lr"] = rate

    def _tell(self, configs: list[SchedulerConfig], loops: Mapping[str, Any]) -> None:
        for config in configs:
            stepped = any(config is other for other in self._stepped)
            where = f"is where it would be after {loops['global_step']} steps and {loops['epochs_done']} epochs"
            name = type(config.scheduler).__name__
            _log.warning("no state of schedulers was converted: %s %s", name, where if stepped else "begins anew")
