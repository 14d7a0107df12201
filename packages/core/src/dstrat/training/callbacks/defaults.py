"""Default callbacks of a Trainer, and the order of callbacks."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, RequestError
from dstrat.training.arguments import adapt, install_hint, read_duration
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.early_stopping import EarlyStopping
from dstrat.training.callbacks.model_checkpoint import ModelCheckpoint
from dstrat.training.callbacks.model_summary import ModelSummary
from dstrat.training.callbacks.progress_bar import ProgressBar
from dstrat.training.callbacks.timer import Timer
from dstrat.training.hooks import check_no_removed_hooks, overrides

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.settings import Duration

_DEFAULTS: dict[str, type[Callback]] = {
    "progress_bar": ProgressBar,
    "model_summary": ModelSummary,
    "checkpointing": ModelCheckpoint,
}
"""Default callbacks by the Trainer's ``enable_`` arguments."""


def complete_callbacks(
    requested: Callback | Sequence[Callback] | None,
    *,
    progress_bar: bool,
    model_summary: bool,
    checkpointing: bool,
    barebones: bool = False,
    max_time: Duration | None = None,
) -> list[Callback]:
    """Return the user's callbacks and the missing default ones.

    The order is the user's, with callbacks that run last after the others, and those that save checkpoints at the end.

    Args:
        requested: One callback, several, or None.
        progress_bar: Whether the Trainer has a progress bar.
        model_summary: Whether it has a model summary.
        checkpointing: Whether it saves checkpoints.
        barebones: Whether ``barebones`` has switched these features off.
        max_time: Time limit of the training; None is no limit.

    Raises:
        RequestError: A value is not a callback, or two callbacks have the same ``state_key``.
        MisuseError: A callback has a hook that Lightning has removed.
        ConflictError: The time is limited twice, a callback is of a feature that is switched off, or there are two
            progress bars.
    """
    callbacks = _as_list(requested, "callbacks")
    enabled_features = {"progress_bar": progress_bar, "model_summary": model_summary, "checkpointing": checkpointing}
    missing: list[Callback] = []
    for name, enabled in enabled_features.items():
        of_feature = [callback for callback in callbacks if isinstance(callback, _DEFAULTS[name])]
        if name == "progress_bar" and len(of_feature) > 1:
            first, second = (type(callback).__name__ for callback in of_feature[:2])
            raise ConflictError(
                f"callbacks has a {first} and a {second}, which would draw over each other: leave one of the two out"
            )
        if enabled and not of_feature:
            missing.append(_DEFAULTS[name]())
        # A summary that the user passes is printed, as in Lightning: the switch is for the default one.
        if not enabled and of_feature and (barebones or name != "model_summary"):
            off = "barebones=True" if barebones else f"enable_{name}=False"
            raise ConflictError(
                f"{off} switches off every {_DEFAULTS[name].__name__}, and callbacks has a "
                f"{type(of_feature[0]).__name__}: leave one of the two out"
            )
    if barebones:
        _check_nothing_is_awaited(callbacks)
    if max_time is not None:
        if any(isinstance(callback, Timer) for callback in callbacks):
            raise ConflictError(
                f"max_time={max_time!r} adds a Timer, and callbacks has one already: "
                "give that one the duration, or leave it out"
            )
        callbacks.append(Timer(read_duration(max_time, "max_time")))
    return _in_order([*callbacks, *missing])


def with_callbacks_of(module: TrainModule, callbacks: Sequence[Callback]) -> list[Callback]:
    """Return the callbacks with those of a module's ``configure_callbacks``, which replace others of the same class.

    Args:
        module: The module.
        callbacks: The Trainer's callbacks.

    Raises:
        RequestError: ``configure_callbacks`` has returned something else than callbacks.
    """
    configure: Callable[[], Any] | None = module.configure_callbacks
    configured = _as_list(configure and configure(), f"{type(module).__name__}.configure_callbacks")
    if not configured:
        return list(callbacks)
    for callback in configured:
        if overrides(callback, "on_before_fit", Callback):  # its hook would never be called
            raise RequestError(
                f"{type(module).__name__}.configure_callbacks is called when a run has begun, and "
                f"{type(callback).__name__} works before that: pass it to the Trainer"
            )
    remaining = [callback for callback in callbacks if not any(type(callback) is type(other) for other in configured)]
    return _in_order([*remaining, *configured])


def check_callbacks(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return callbacks that a user has put together, in the order of their hooks.

    Raises:
        RequestError: One is not a callback, or two have the same ``state_key``.
    """
    return _in_order(_as_list(callbacks, "trainer.callbacks"))


def _as_list(value: Any, name: str) -> list[Callback]:
    if value is None:
        return []
    # A str is a mistake: as an iterable it would be reported letter by letter.
    passed: list[Any] = list(value) if isinstance(value, Iterable) and not isinstance(value, str) else [value]
    callbacks: list[Any] = [adapt(one, Callback) for one in passed]
    for callback in callbacks:
        if not isinstance(callback, Callback):
            hint = install_hint(callback)
            raise RequestError(f"{name}={callback!r} is not a Callback{hint}")
        check_no_removed_hooks(callback, is_callback=True)
    return callbacks


def _in_order(callbacks: Sequence[Callback]) -> list[Callback]:
    """Return callbacks in the order of their hooks; those with the same attributes keep the user's order."""
    stateful = [callback for callback in callbacks if callback.state_dict()]  # without state a key may be shared
    keys = [callback.state_key for callback in stateful]
    for callback, key in zip(stateful, keys, strict=True):
        if keys.count(key) > 1:
            takes_one = "state_key" in inspect.signature(type(callback)).parameters
            way = "pass state_key='another' to one of them" if takes_one else "override state_key in the class of one"
            raise RequestError(
                f"two callbacks have the state_key {key!r}, so a checkpoint could not tell them apart: {way}"
            )
    return sorted(callbacks, key=lambda callback: (callback.saves_checkpoints, callback.runs_last))


def _check_nothing_is_awaited(callbacks: Sequence[Callback]) -> None:
    """Raise a ConflictError for a callback that monitors a logged value, since barebones logs none."""
    for callback in callbacks:
        if isinstance(callback, EarlyStopping):
            raise ConflictError(
                f"barebones=True logs no values, and {type(callback).__name__}(monitor={callback.monitor!r}) waits for "
                "one: leave one of the two out"
            )
