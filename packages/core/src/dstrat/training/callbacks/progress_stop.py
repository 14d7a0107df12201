"""The line that says where a run was stopped, and from which checkpoint it can go on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.builtin.checkpoint.place import place
from dstrat.training.checkpoint_path import written_ns

if TYPE_CHECKING:
    from dstrat.training.trainer import Trainer

_PATHS = ("ckpt_path", "last_model_path", "best_model_path")
_STAGES = {"fit": "training", "validate": "validation", "test": "test", "predict": "prediction"}


def describe_stop(trainer: Trainer, exception: BaseException) -> str:
    """Return what was stopped by what, and where the newest checkpoint of a fit is.

    For example ``training interrupted in epoch 3, after 1234 steps; newest checkpoint: logs/last.ckpt``.
    """
    text = f"{_STAGES[trainer.stage]} {_verb(exception)}"
    if not trainer.is_fitting:
        return text
    if trainer.sanity_checking:
        return f"{text} in the sanity check"
    text += f" in epoch {trainer.current_epoch + 1}, after {trainer.global_step} steps"
    path = newest_checkpoint(trainer)
    return f"{text}; newest checkpoint: {path}" if path else text


def newest_checkpoint(trainer: Trainer) -> str | None:
    """Return the checkpoint that was written last, of those that the callbacks name; None without one."""
    named = (getattr(callback, name, None) for callback in trainer.checkpoint_callbacks for name in _PATHS)
    written = [(when, path) for path in named if path and (when := _written_ns(path)) is not None]
    return max(written)[1] if written else None


def _written_ns(path: str) -> int | None:
    """Return when a checkpoint was written; None where it is not there, or nobody can say."""
    try:
        return written_ns(place(path))
    except OSError:
        return None


def _verb(exception: BaseException) -> str:
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted"
    if isinstance(exception, SystemExit):
        return "terminated"
    return f"stopped by {type(exception).__name__}"
