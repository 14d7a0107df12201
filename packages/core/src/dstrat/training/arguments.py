"""Checking the Trainer's plain arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import RequestError
from dstrat.training.data.loaders import check_limit

if TYPE_CHECKING:
    from dstrat.training.trainer import Trainer

_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
_AT_LEAST = {
    "max_epochs": -1,
    "max_steps": -1,
    "check_val_every_n_epoch": 1,
    "num_sanity_val_steps": 0,
    "log_every_n_steps": 1,
    "accumulate_grad_batches": 1,
}


def check_arguments(trainer: Trainer) -> None:
    """Check the counts, limits and choices that a Trainer was given.

    Raises:
        RequestError: One of them is out of range or of another type; the message names it.
    """
    for name in _LIMITS:
        check_limit(getattr(trainer, name), name)
    for name, least in _AT_LEAST.items():
        _check_count(getattr(trainer, name), name, least)
    _check_interval(trainer.val_check_interval)
    _check_clipping(trainer.gradient_clip_val, trainer.gradient_clip_algorithm)


def _check_count(value: Any, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{name}={value!r} must be an int of at least {least}")


def _check_interval(value: Any) -> None:
    count = isinstance(value, int) and not isinstance(value, bool) and value > 0
    fraction = isinstance(value, float) and 0.0 < value <= 1.0
    if value is not None and not count and not fraction:
        raise RequestError(
            f"val_check_interval={value!r} must be a number of batches (int) "
            "or a fraction of the epoch (float, up to 1.0)"
        )


def _check_clipping(value: Any, algorithm: Any) -> None:
    if algorithm not in ("norm", "value"):
        raise RequestError(f"gradient_clip_algorithm={algorithm!r} must be 'norm' or 'value'")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and (not number or value <= 0):
        raise RequestError(f"gradient_clip_val={value!r} must be a positive number, or None to clip nothing")
