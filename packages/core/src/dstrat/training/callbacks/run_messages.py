"""Values and messages about a training: after a step, after an epoch, at its end."""

from __future__ import annotations

from shutil import get_terminal_size
from time import monotonic
from typing import TYPE_CHECKING, Any, TextIO

from dstrat.checkpoint.paths import as_path, shown_path
from dstrat.training.callbacks.progress import format_duration, format_value
from dstrat.training.checkpoint.path import written_ns

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.training.run import Run


BEST = " (best)"
"""Mark of a value that was the best one of its name when it was displayed."""


def read_loss(loss: Any) -> float | None:
    """Return the loss of a batch, read from its device; None for what is no number, as in manual optimization."""
    if isinstance(loss, int | float) or (hasattr(loss, "numel") and loss.numel() == 1 and not loss.is_complex()):
        return float(loss)
    return None


def values_of_step(values: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return the values to display within an epoch: of a name that is logged for both, only that of the step."""
    return {
        name: value
        for name, value in values.items()
        if not (name.endswith("_epoch") and name.removesuffix("_epoch") in values)
    }


def values_of_epoch(values: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return the values to display after an epoch: of a name that is logged for both, only that of the epoch."""
    return {name: values.get(f"{name}_epoch", value) for name, value in values_of_step(values).items()}


def mark_best(run: Run, values: Mapping[str, float | str]) -> dict[str, float | str]:
    """Return the values, with a mark at those that are the best of a monitored name until now."""
    best = {}
    for callback in run.checkpoint_callbacks:
        score = getattr(callback, "best_model_score", None)
        if score is not None:
            best[getattr(callback, "monitor", None)] = float(score)
    return {
        name: f"{format_value(value)}{BEST}" if name in best and best[name] == value else value
        for name, value in values.items()
    }


def print_message(parts: list[str], stream: TextIO) -> None:
    """Print a message in one line; in several where a terminal would cut it, as a path in two cannot be copied."""
    line = "; ".join(parts)
    is_cut = stream.isatty() and len(line) > get_terminal_size().columns
    print("\n".join(parts) if is_cut else line, file=stream, flush=True)


# Message of a completed training


def describe_training(
    run: Run, start: float, epochs_before: int, steps_before: int, values: Mapping[str, float | str]
) -> str:
    """Return the message about a completed training, such as ``trained 3 epochs, 384 steps, in 4.1 s: loss 0.012``.

    Args:
        run: At the end of a fit.
        start: Time of its start, of the monotonic clock.
        epochs_before: Number of epochs that a resumed training had done.
        steps_before: Number of its optimizer steps.
        values: Displayed values by name.
    """
    epochs, steps = run.fit_loop.epochs_done - epochs_before, run.fit_loop.global_step - steps_before
    seconds = monotonic() - start
    time = f"{format_value(seconds, digits=2)} s" if seconds < 60 else format_duration(seconds)
    shown = ", ".join(
        f"{name} {format_value(value)}" for name, value in mark_best(run, values_of_epoch(values)).items()
    )
    # max_steps may end a training within its first epoch.
    counts = f"{_count(epochs, 'epoch')}, {_count(steps, 'step')}" if epochs else _count(steps, "step")
    return f"trained {counts}, in {time}{f': {shown}' if shown else ''}"


def describe_files(run: Run) -> list[str]:
    """Return where a training has saved its best or newest checkpoint, and its logs.

    A checkpoint that is a folder ends with a slash: torch.load cannot read it.
    """
    named = [getattr(callback, "best_model_path", "") for callback in run.checkpoint_callbacks]
    best = next((path for path in named if path), None) or newest_checkpoint(run)
    folder = next((logger.log_dir for logger in run.loggers if logger.log_dir), None)
    is_folder = best is not None and run.strategy.checkpoint_io.is_collective
    checkpoint = [f"checkpoint {shown_path(best)}{'/' * is_folder}"] if best else []
    return [*checkpoint, f"logs {shown_path(folder)}"] if folder else checkpoint


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


# Message of an interrupted run


_PATHS = ("ckpt_path", "last_model_path", "best_model_path")
_STAGES = {"fit": "training", "validate": "validation", "test": "test", "predict": "prediction"}


def describe_stop(run: Run, exception: BaseException) -> list[str]:
    """Return where a run was stopped, and its newest checkpoint.

    For example ``training interrupted in epoch 3, after 1234 steps`` and ``newest checkpoint: logs/last.ckpt``.
    """
    text = f"{_STAGES[run.stage]} {_verb(exception)}"
    if not run.is_fitting:
        return [text]
    if run.sanity_checking:
        return [f"{text} in the sanity check"]
    text += f" in epoch {run.fit_loop.epoch + 1}, after {run.fit_loop.global_step} steps"
    path = newest_checkpoint(run)
    return [text, f"newest checkpoint: {shown_path(path)}"] if path else [text]


def newest_checkpoint(run: Run) -> str | None:
    """Return the newest of the callbacks' checkpoints; None without one."""
    named = (getattr(callback, name, None) for callback in run.checkpoint_callbacks for name in _PATHS)
    written = [(when, path) for path in named if path and (when := _written_ns(path)) is not None]
    return max(written)[1] if written else None


def _written_ns(path: str) -> int | None:
    """Return the time when a checkpoint was written; None if it does not exist, or the time is unknown."""
    try:
        return written_ns(as_path(path))
    except OSError:
        return None


def _verb(exception: BaseException) -> str:
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted"
    if isinstance(exception, SystemExit):
        return "terminated"
    # Of other ranks too, where it says that a connection was lost: the traceback has the reason.
    return "failed"
