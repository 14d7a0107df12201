"""Progress of a run, shown while it goes on."""

from __future__ import annotations

import math
import os
import sys
from time import monotonic
from typing import TYPE_CHECKING, Any, Protocol

from typing_extensions import override

from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.progress import Progress

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class Display(Protocol):
    """Where progress is shown.

    Attributes:
        seconds_between_updates: How often it is worth an update.
        starts_at_once: Whether the first update comes without that delay.
    """

    seconds_between_updates: float
    starts_at_once: bool

    def update(self, running: Sequence[Progress], values: Mapping[str, float]) -> None:
        """Show the loops that run, outermost first."""

    def finish(self, progress: Progress, values: Mapping[str, float]) -> None:
        """Show a loop that is over."""

    def close(self) -> None:
        """End the display."""


class ProgressBar(Callback):
    """Shows epochs, batches, speed and the values logged with ``prog_bar=True``, on stderr of global rank 0.

    On a terminal bars move; elsewhere (files, pipes, notebooks) there is a line for each epoch and every 10 seconds.
    A batch costs a look at the clock.  Values are read from their device only when they are shown, in the thread
    that trains: a thread of its own would race with it for them, and leave locks behind when workers are forked.

    Args:
        refresh_seconds: Time between two updates; by default 0.3 on a terminal and 10 elsewhere.
    """

    def __init__(self, refresh_seconds: float | None = None) -> None:
        self._refresh_seconds = refresh_seconds
        self._display: Display | None = None
        self._next_update = math.inf
        self._training: Progress | None = None
        self._batches_before = 0
        self._evaluation: Progress | None = None
        self._evaluation_start = 0.0
        self._evaluated = 0
        self._values: dict[str, float] = {}

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._open(trainer)

    @override
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish_epoch(trainer)
        self._batches_before = trainer.fit_loop.batches_seen
        self._training = Progress(_epoch_title(trainer), _batches_of_epoch(trainer))
        self._update_when_due(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if monotonic() >= self._next_update:
            self._update(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        if self._training is not None:
            self._training.reach(trainer.fit_loop.batches_seen - self._batches_before)

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish_epoch(trainer)
        self._close()

    @override
    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start_evaluation(trainer, "Sanity check" if trainer.sanity_checking else "Validation")

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(trainer)

    @override
    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_evaluation(trainer)

    @override
    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start_evaluation(trainer, "Test")

    @override
    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(trainer)

    @override
    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_evaluation(trainer)

    @override
    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start_evaluation(trainer, "Prediction")

    @override
    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(trainer)

    @override
    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_evaluation(trainer)

    @override
    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if self._display is not None and self._running:
            self._advance(trainer)
            self._display.update(self._running, self._values)  # those shown last: reading others might fail again
        self._close()

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._close()

    def _start_evaluation(self, trainer: Trainer, title: str) -> None:
        self._open(trainer)
        self._advance(trainer)
        counts = [count for count in trainer.evaluation_batches if count is not None]
        is_known = len(counts) == len(trainer.evaluation_batches)
        self._evaluation = Progress(title, sum(counts) if is_known else None)
        self._evaluation_start = monotonic()
        self._evaluated = 0
        self._update_when_due(trainer)

    def _count(self, trainer: Trainer) -> None:
        self._evaluated += 1
        if monotonic() >= self._next_update:
            self._update(trainer)

    def _end_evaluation(self, trainer: Trainer) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if self._display is None or evaluation is None:
            return
        if self._training is not None:
            self._training.skip(monotonic() - self._evaluation_start)
        self._take_values(trainer)
        if not trainer.is_fitting:
            evaluation.reach(self._evaluated)
            self._display.finish(evaluation, self._values)
            self._close()

    def _finish_epoch(self, trainer: Trainer) -> None:
        if self._display is not None and self._training is not None:
            self._take_values(trainer)
            self._display.finish(self._training, self._values)
        self._training = None

    def _update_when_due(self, trainer: Trainer) -> None:
        if monotonic() >= self._next_update:
            self._update(trainer)

    def _update(self, trainer: Trainer) -> None:
        if self._display is not None:
            self._advance(trainer)
            self._take_values(trainer)
            self._display.update(self._running, self._values)
            self._schedule(self._display)

    def _advance(self, trainer: Trainer) -> None:
        if self._evaluation is not None:
            self._evaluation.reach(self._evaluated)
        elif self._training is not None:
            self._training.reach(trainer.fit_loop.batches_seen - self._batches_before)

    @property
    def _running(self) -> list[Progress]:
        return [progress for progress in (self._training, self._evaluation) if progress is not None]

    def _take_values(self, trainer: Trainer) -> None:
        if not trainer.sanity_checking:
            self._values |= trainer.progress_bar_metrics

    def _open(self, trainer: Trainer) -> None:
        if self._display is not None or not trainer.is_global_zero:
            return
        self._training = self._evaluation = None
        self._values = {}
        self._display = _make_display()
        self._next_update = 0.0
        if not self._display.starts_at_once:
            self._schedule(self._display)

    def _schedule(self, display: Display) -> None:
        wait = display.seconds_between_updates if self._refresh_seconds is None else self._refresh_seconds
        self._next_update = monotonic() + wait

    def _close(self) -> None:
        display, self._display = self._display, None
        self._next_update = math.inf
        if display is not None:
            display.close()


def _make_display() -> Display:
    """Return bars for a terminal that can move its cursor, lines for everything else; rich is loaded for bars only."""
    if sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown"):
        from dstrat.training.callbacks.progress_live import LiveDisplay

        return LiveDisplay()
    from dstrat.training.callbacks.progress_lines import LineDisplay

    return LineDisplay()


def _epoch_title(trainer: Trainer) -> str:
    number = trainer.current_epoch + 1
    return f"Epoch {number}/{trainer.max_epochs}" if trainer.max_epochs > 0 else f"Epoch {number}"


def _batches_of_epoch(trainer: Trainer) -> int | None:
    """Return the number of batches until the epoch ends, or training does before."""
    of_epoch = trainer.num_training_batches
    if trainer.max_steps < 0:
        return of_epoch
    of_steps = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches
    return of_steps if of_epoch is None else min(of_epoch, of_steps)
