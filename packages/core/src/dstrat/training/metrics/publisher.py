"""Bringing what is logged to callbacks, the progress bar and the loggers, when it is due."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

from dstrat.training.loggers.several import agree_on_folders, call_loggers
from dstrat.training.metrics.entry import DATALOADER_SUFFIX
from dstrat.training.metrics.latest import Metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from dstrat.training.metrics.logged import LoggedValues
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.state import RunState

SECONDS_BETWEEN_SAVES = 10.0


class Publisher:
    """Publishes the values of steps and epochs.

    Args:
        trainer: Has the loggers, and is where others find :class:`Metrics` and the stage that logs now.
    """

    def __init__(self, trainer: RunState) -> None:
        self._trainer = trainer
        self._last_save = monotonic()

    def start(self) -> None:
        """Forget what an earlier run or a sanity check has logged."""
        self._trainer.metrics = Metrics(self._trainer.strategy)

    def agree_on_folders(self) -> None:
        """Let rank 0 choose where the loggers write, and tell the others; collective."""
        self._trainer.agreed_log_dir = agree_on_folders(self._trainer.loggers, self._trainer.strategy)

    def follow(self, logged: LoggedValues) -> None:
        """Let the module log to a stage; values of another one stay known."""
        self._trainer.logged = logged
        self._trainer.metrics.follow(logged)

    def start_run(self) -> None:
        """Let the loggers begin."""
        call_loggers(self._trainer.loggers, "start_run")

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the settings of the run."""
        if params:
            call_loggers(self._trainer.loggers, "log_hyperparams", params)

    def log_graph(self, module: TrainModule) -> None:
        """Write the graph of the module, in loggers that do so; before the strategy wraps it."""
        call_loggers(self._trainer.loggers, "log_graph", module)

    def publish_step(self, logged: LoggedValues) -> None:
        """Write the values of steps to the loggers; collective."""
        self._write(self._trainer.metrics.of_step(logged))

    def publish_evaluation_step(self, logged: LoggedValues, batches_seen: int) -> None:
        """Write the values of an evaluation step of this process; their axis is the number of batches evaluated."""
        values = self._trainer.metrics.of_own_step(logged)
        if not self._trainer.sanity_checking:
            self._write(values, step=batches_seen)

    def publish_epoch(self, logged: LoggedValues, hooks: Iterable[Callable[[], Any]]) -> None:
        """Reduce the values over the epoch, call the hooks at its end, and write all to the loggers; collective.

        The hooks see the values, and may log more.
        """
        trainer, metrics = self._trainer, self._trainer.metrics
        metrics.start_epoch()
        values = metrics.of_epoch(logged)
        for hook in hooks:
            hook()
        values |= metrics.of_epoch(logged)
        logged.end_epoch()
        if not trainer.sanity_checking:
            self._write(values)
            self._save_when_due()

    def results(self, logged: LoggedValues, num_loaders: int) -> list[dict[str, float]]:
        """Return the values that an evaluation logged, as numbers, a dict for each loader; collective."""
        values = self._trainer.metrics.as_numbers(self._trainer.metrics.latest_epoch)
        if num_loaders == 1:
            return [values]
        suffixes = [f"{DATALOADER_SUFFIX}{index}" for index in range(num_loaders)]
        loaders_of = self._trainer.strategy.broadcast(logged.loaders_of)  # another process may lack a loader's batches

        def is_of(name: str, suffix: str) -> bool:
            return name.endswith(suffix) if DATALOADER_SUFFIX in name else suffix in loaders_of.get(name, suffixes)

        return [{name: value for name, value in values.items() if is_of(name, suffix)} for suffix in suffixes]

    def finalize(self, status: str) -> None:
        """Close the loggers; the status is success, failed or interrupted."""
        call_loggers(self._trainer.loggers, "finalize", status)

    def _write(self, values: dict[str, float], *, step: int | None = None) -> None:
        if values:
            row = {"epoch": self._trainer.current_epoch, **values}
            call_loggers(self._trainer.loggers, "log_metrics", row, self._trainer.global_step if step is None else step)

    def _save_when_due(self) -> None:
        """Bring the rows to the disk at the end of an epoch, but not at that of every short one."""
        if monotonic() - self._last_save > SECONDS_BETWEEN_SAVES:
            call_loggers(self._trainer.loggers, "save")
            self._last_save = monotonic()
