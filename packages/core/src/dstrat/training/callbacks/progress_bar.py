"""Progress bar of a run."""

from __future__ import annotations

import math
import os
import sys
import threading
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from typing_extensions import override

from dstrat.errors import MisuseError, RequestError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.progress import EvaluationProgress, Progress
from dstrat.training.callbacks.run_messages import (
    describe_files,
    describe_stop,
    describe_training,
    mark_best,
    print_message,
    read_loss,
    values_of_epoch,
    values_of_step,
)
from dstrat.training.notebook import has_notebook

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


SECONDS_BETWEEN_TICKS = 0.5
"""Seconds between redraws while no batch ends, so that a long batch does not look like a hang."""


class ProgressBar(Callback):
    """Display of epochs, batches, speed, the loss and the values logged with ``prog_bar=True``, on stderr of rank 0.

    A terminal shows moving bars below a line for each epoch, and a notebook below a table with a row for each; files
    and pipes get the lines, and one every 10 seconds.  ``(best)`` follows the value of an epoch whose checkpoint is the
    best one.  A training ends with a line of its steps, time, checkpoint and logs; a failed one with its last state,
    position and newest checkpoint.

    The loss is that of the last batch on rank 0, and is left out where the module logs one for the bar.

    Each batch costs one read of the clock.  Values are read from their device only when they are displayed, in the
    training thread.  In between, another thread draws the time and the number of batches.

    Attributes:
        refresh_rate: Minimal number of batches between two updates; 0 shows nothing.

    Args:
        refresh_seconds: Seconds between two updates; by default 0.3 on a terminal and 10 elsewhere.

    Raises:
        RequestError: The time is negative.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        **{
            f"{loop}_description": "the titles of loops are fixed"
            for loop in ("sanity_check", "train", "validation", "test", "predict")
        },
        **{
            f"total_{loop}_batches_current_dataloader": f"trainer.num_{loop}_batches has the number of each loader"
            for loop in ("val", "test", "predict")
        },
        "has_dataloader_changed": "hooks of batches get dataloader_idx",
        "reset_dataloader_idx_tracker": "hooks of batches get dataloader_idx",
    }
    refresh_rate: int = 1

    def __init__(self, refresh_seconds: float | None = None) -> None:
        if refresh_seconds is not None and refresh_seconds < 0:
            raise RequestError(f"ProgressBar(refresh_seconds={refresh_seconds!r}) must be 0 or more")
        self._refresh_seconds = refresh_seconds
        self._display: Display | None = None
        self._ticker: Ticker | None = None
        self._drawn_at = 0.0
        self._next_update = math.inf  # without a display: no batch is due on ranks other than 0
        self._training: Progress | None = None
        self._batches_before = 0
        self._evaluation: EvaluationProgress | None = None
        self._evaluation_start = 0.0
        self._values: dict[str, float | str] = {}
        self._loss: Any = None  # of the last batch, before it is read from the device
        self._loss_name: str | None = None  # its name among the values, where the module logs none
        self._stop: BaseException | None = None
        self._start: tuple[float, int, int] = (0.0, 0, 0)  # time, epochs and steps done before this fit
        self._summary = ""
        self._trainer: Trainer | None = None
        self._is_enabled = True

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_trainer": None}  # that of an earlier run, which cannot be pickled

    # For subclasses, by Lightning's names

    @property
    def trainer(self) -> Trainer:
        """The Trainer of the current run, or of the last one.

        Raises:
            MisuseError: There was no run yet, or a subclass overrides ``setup`` without calling it.
        """
        if self._trainer is None:
            raise MisuseError(
                f"{type(self).__name__}.trainer is known from setup on: read it in a later hook, and call "
                "super().setup(trainer, module, stage) in a setup of your own"
            )
        return self._trainer

    @trainer.setter
    def trainer(self, trainer: Trainer) -> None:
        self._trainer = trainer

    @property
    def total_train_batches(self) -> float:
        """Number of training batches until the epoch or the training ends; infinite if it is unknown."""
        return _as_total(_batches_of_epoch(self.trainer))

    @property
    def total_val_batches(self) -> float:
        """Number of batches of all validation loaders, of the sanity check during it; infinite if it is unknown."""
        trainer = self.trainer
        return _sum_of(trainer.num_sanity_val_batches if trainer.sanity_checking else trainer.num_val_batches)

    @property
    def total_test_batches(self) -> float:
        """Number of batches of all test loaders; infinite if it is unknown."""
        return _sum_of(self.trainer.num_test_batches)

    @property
    def total_predict_batches(self) -> float:
        """Number of batches of all prediction loaders; infinite if it is unknown."""
        return _sum_of(self.trainer.num_predict_batches)

    @property
    def is_enabled(self) -> bool:
        """Whether the bar is shown."""
        return self._is_enabled and self.refresh_rate > 0

    @property
    def is_disabled(self) -> bool:
        """Whether the bar is not shown."""
        return not self.is_enabled

    def enable(self) -> None:
        """Show the bar again, from the next loop on."""
        self._is_enabled = True

    def disable(self) -> None:
        """Hide the bar."""
        self._is_enabled = False
        self._close()

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print a line; the bar continues below it."""
        print(*args, **kwargs)

    # The run

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._trainer = trainer

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._open(trainer)
        self._loss = None
        self._start = monotonic(), trainer.fit_loop.epochs_done, trainer.global_step

    @override
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish_epoch(trainer)
        done = trainer.fit_loop.batches_done  # not 0 in a resumed epoch
        self._batches_before = trainer.fit_loop.batches_seen - done
        self._training = Progress(_epoch_title(trainer), _batches_of_epoch(trainer), done)
        self._update_when_due(trainer)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        loop = trainer.fit_loop  # several batches are one call of a compiled step
        # No calls, which would be two for each batch; outputs of manual optimization may be anything.
        self._loss = outputs["loss"] if type(outputs) is dict and "loss" in outputs else None
        if monotonic() >= self._next_update and loop.batches_done % self.refresh_rate < loop.data.batches_per_item:
            self._update(trainer)

    @override
    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._reach(trainer)

    @override
    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._finish_epoch(trainer)
        if self._display is not None:
            self._summary = describe_training(trainer.run, *self._start, self._values)
        self._close()

    @override
    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._start_evaluation(trainer, "Sanity check" if trainer.sanity_checking else "Validation")

    @override
    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._count(trainer, dataloader_idx)

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
        self._count(trainer, dataloader_idx)

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
        self._count(trainer, dataloader_idx)

    @override
    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        self._end_evaluation(trainer)

    @override
    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        if self._display is not None:
            self._stop = exception
            self._draw(trainer)  # with the last displayed values: reading new ones from the device might fail
        self._close()

    @override
    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        self._close()
        # Printed here, after other callbacks have saved their last checkpoints.
        stop, self._stop = self._stop, None
        summary, self._summary = self._summary, ""
        self._loss = None
        if stop is not None:
            print_message(describe_stop(trainer.run, stop), sys.stderr)
        elif summary:
            # A notebook shows stderr in red, as an error.
            stream = sys.stdout if has_notebook() else sys.stderr
            print_message([summary, *describe_files(trainer.run)], stream)

    # Methods to override

    def get_metrics(self, trainer: Trainer, module: TrainModule) -> dict[str, float | str]:  # noqa: ARG002 - for subclasses
        """Return the values to display by name; called when the bar is drawn."""
        return dict(trainer.progress_bar_metrics)

    def make_display(self) -> Display:
        """Return the display of a run."""
        return make_display()

    # The loops

    def _finish_epoch(self, trainer: Trainer) -> None:
        finished, self._training = self._training, None
        if self._display is not None and finished is not None:
            self._take_values(trainer)
            self._display.finish(finished, mark_best(trainer.run, values_of_epoch(self._values)))

    def _start_evaluation(self, trainer: Trainer, title: str) -> None:
        self._open(trainer)
        self._reach(trainer)
        if self._display is not None and trainer.is_fitting and not trainer.sanity_checking:
            self._take_values(trainer)  # displayed during the validation
        loop = trainer.run.evaluation_loop
        assert loop is not None  # noqa: S101 - this is a hook of it
        self._evaluation = EvaluationProgress(
            title, loop.current_batches, trainer.strategy.evaluation_batches_per_item()
        )
        self._evaluation_start = monotonic()
        self._update_when_due(trainer)

    def _count(self, trainer: Trainer, dataloader_idx: int) -> None:
        if self._evaluation is None or self._display is None:
            return
        if self._evaluation.count(dataloader_idx, self.refresh_rate):
            self._update_when_due(trainer)

    def _end_evaluation(self, trainer: Trainer) -> None:
        evaluation, self._evaluation = self._evaluation, None
        if self._display is None or evaluation is None:
            return
        if self._training is not None:
            self._training.skip(monotonic() - self._evaluation_start)
        self._take_values(trainer)
        if not trainer.is_fitting:
            self._display.finish(evaluation.finished(), self._values)
            self._close()

    # Drawing

    def _update_when_due(self, trainer: Trainer) -> None:
        if monotonic() >= self._next_update:
            self._update(trainer)

    def _update(self, trainer: Trainer) -> None:
        if self._display is not None:
            self._take_values(trainer)
            self._draw(trainer)
            self._next_update = monotonic() + self._seconds_between(self._display)

    def _draw(self, trainer: Trainer) -> None:
        # Read once: in the ticker's thread, the training thread may replace them meanwhile.
        display, training, evaluation = self._display, self._training, self._evaluation
        self._reach(trainer)
        running = [] if training is None else [training]
        if evaluation is not None:
            running.append(evaluation.now())
        if display is not None and running:
            display.update(running, values_of_step(self._values))
            self._drawn_at = monotonic()

    def _tick(self, trainer: Trainer, training_thread: int) -> float | None:
        """Redraw if a time has passed since the last drawing, in the ticker's thread; return the seconds until then."""
        if self._display is None:
            return None
        seconds = max(SECONDS_BETWEEN_TICKS, self._seconds_between(self._display))
        if monotonic() < self._drawn_at + seconds:
            return self._drawn_at + seconds - monotonic()
        try:
            if not is_at_a_prompt(training_thread):
                self._draw(trainer)
        except OSError:  # the terminal has closed; the training thread raises the error
            return None
        return seconds

    def _reach(self, trainer: Trainer) -> None:
        if self._training is not None:
            self._training.reach(trainer.fit_loop.batches_seen - self._batches_before)

    def _take_values(self, trainer: Trainer) -> None:
        if not trainer.sanity_checking and trainer.module is not None:  # values of a sanity check are discarded
            values = self.get_metrics(trainer, trainer.module)
            logs_loss = any("loss" in name and not name.startswith("val") for name in values)
            loss = None if logs_loss else read_loss(self._loss)
            # New dicts, since the ticker's thread may be reading the old one.
            self._values = {name: value for name, value in self._values.items() if name != self._loss_name} | values
            self._loss_name = None if loss is None else "loss"
            if loss is not None:  # that of accumulated batches is divided by their number
                self._values = {"loss": loss * trainer.fit_loop.group_divisor, **self._values}

    def _open(self, trainer: Trainer) -> None:
        # A sanity check has opened it before on_train_start.
        if self._display is not None or not trainer.is_global_zero or self.is_disabled:
            return
        self._training = self._evaluation = self._stop = None
        self._values, self._loss_name = {}, None
        self._display = display = self.make_display()
        self._drawn_at = monotonic()
        self._next_update = 0.0 if display.starts_at_once else monotonic() + self._seconds_between(display)
        if display.shows_time:
            self._ticker = Ticker(partial(self._tick, trainer, threading.get_ident()))

    def _seconds_between(self, display: Display) -> float:
        return display.seconds_between_updates if self._refresh_seconds is None else self._refresh_seconds

    def _close(self) -> None:
        display, self._display = self._display, None
        ticker, self._ticker = self._ticker, None
        self._next_update = math.inf
        if ticker is not None:
            ticker.stop()
        if display is not None:
            display.close()


def _as_total(count: int | None) -> float:
    return math.inf if count is None else count


def _sum_of(counts: Sequence[int | None]) -> float:
    return sum(map(_as_total, counts))


def _epoch_title(trainer: Trainer) -> str:
    number = trainer.current_epoch + 1
    return f"Epoch {number}/{trainer.max_epochs}" if trainer.max_epochs > 0 else f"Epoch {number}"


def _batches_of_epoch(trainer: Trainer) -> int | None:
    """Return the number of batches until the epoch or the training ends; None if it is unknown."""
    of_epoch = trainer.num_training_batches
    if trainer.max_steps < 0:
        return of_epoch
    loop = trainer.fit_loop
    # Of the step that is being accumulated, in_group batches are done.
    remaining = (trainer.max_steps - trainer.global_step) * trainer.accumulate_grad_batches - loop.in_group
    of_steps = loop.batches_done + remaining
    return of_steps if of_epoch is None else min(of_epoch, of_steps)


# Displays: notebook, terminal and plain output


class Display(Protocol):
    """A display of progress.

    Attributes:
        seconds_between_updates: Seconds between two updates.
        starts_at_once: Whether the first update has no such delay.
        shows_time: Whether it shows the elapsed time, which needs updates between batches.
    """

    seconds_between_updates: float
    starts_at_once: bool
    shows_time: bool

    def update(self, running: Sequence[Progress], values: Mapping[str, float | str]) -> None:
        """Show the running loops, outermost first."""

    def finish(self, progress: Progress, values: Mapping[str, float | str]) -> None:
        """Show a finished loop."""

    def close(self) -> None:
        """End the display."""


def has_terminal() -> bool:
    """Return whether stderr is a terminal that can move its cursor."""
    return sys.stderr.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")


def make_display() -> Display:
    """Return a table for a notebook, bars for a terminal that can move its cursor, lines for everything else."""
    if has_notebook():
        from dstrat.training.callbacks.progress_notebook import NotebookDisplay

        return NotebookDisplay()
    if has_terminal():  # rich is imported only then
        from dstrat.training.callbacks.progress_terminal import LiveDisplay

        return LiveDisplay()
    from dstrat.training.callbacks.progress import LineDisplay

    return LineDisplay()


# Periodic updates from a thread


_PROMPTS = ("bdb", "cmd", "code", "IPython", "ipdb", "pudb")  # modules that run while a user types


class Ticker:
    """A thread that calls a function periodically.

    Args:
        tick: Returns the seconds until its next call; None ends the thread.
    """

    def __init__(self, tick: Callable[[], float | None]) -> None:
        self._tick = tick
        self._stopped = threading.Event()
        # A daemon, so that a process that ends without teardown does not wait for it.
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (seconds := self._tick()) is not None and not self._stopped.wait(seconds):
            pass

    def stop(self) -> None:
        """End the thread after the current call, and wait for it."""
        self._stopped.set()
        self._thread.join()


def is_at_a_prompt(thread_id: int) -> bool:
    """Return whether a training thread is in a debugger or another interactive prompt, which a redraw would garble."""
    frame = sys._current_frames().get(thread_id)  # noqa: SLF001 - documented, for debugging
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package in _PROMPTS:
            return True
        if package == "dstrat":  # called by the prompt of an IPython, which waits meanwhile
            return False
        frame = frame.f_back
    return False
