"""The callbacks that a Trainer adds to the user's own."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import RequestError
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Sequence


def complete_callbacks(
    given: Callback | Sequence[Callback] | None, *, progress_bar: bool, model_summary: bool, checkpointing: bool
) -> list[Callback]:
    """Return the user's callbacks and the default ones that they lack; those that run last come last.

    Args:
        given: One callback, several, or none.
        progress_bar: Whether a progress bar is wanted.
        model_summary: Whether a summary of the layers is wanted.
        checkpointing: Whether checkpoints are wanted.

    Raises:
        RequestError: Something given is no callback, or two of them have the same ``state_key``.
    """
    callbacks = [given] if isinstance(given, Callback) else list(given or ())
    for callback in callbacks:
        if not isinstance(callback, Callback):
            raise RequestError(f"callbacks={callback!r} is not a Callback (pass an instance, not a class)")
    wanted = [(_progress_bar, progress_bar), (_model_summary, model_summary), (_model_checkpoint, checkpointing)]
    for find, enabled in wanted:
        if enabled and not any(isinstance(callback, find()) for callback in callbacks):
            callbacks.append(find()())
    _check_keys(callbacks)
    return sorted(callbacks, key=lambda callback: callback.runs_last)


def _progress_bar() -> type[Callback]:
    from dstrat.training.callbacks.progress_bar import ProgressBar

    return ProgressBar


def _model_summary() -> type[Callback]:
    from dstrat.training.callbacks.model_summary import ModelSummary

    return ModelSummary


def _model_checkpoint() -> type[Callback]:
    from dstrat.training.callbacks.model_checkpoint import ModelCheckpoint

    return ModelCheckpoint


def _check_keys(callbacks: Sequence[Callback]) -> None:
    keys = [callback.state_key for callback in callbacks if callback.state_dict()]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise RequestError(
            f"two callbacks have the state_key {twice[0]!r}, so a checkpoint could not tell them apart: "
            "give one of them a state_key of its own"
        )
