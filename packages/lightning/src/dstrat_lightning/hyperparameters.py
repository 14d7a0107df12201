"""Hyperparameters that Lightning has saved, as ours."""

from __future__ import annotations

from typing import Any

from dstrat.training.module.hyperparameters import HyperparametersMixin, Saved
from dstrat.training.module.plain_values import AttributeDict, fields_of


def take_hyperparameters(owner: HyperparametersMixin) -> None:
    """Let a converted module or data module have the hyperparameters that its ``__init__`` saved by Lightning."""
    values: dict[str, Any] = vars(owner)
    current = AttributeDict(fields_of(values.get("_hparams") or {}) or {})
    initial = AttributeDict(fields_of(values.get("_hparams_initial") or {}) or {})
    owner._hyperparameters = Saved(  # noqa: SLF001 - __new__ of the mixin makes it, and Lightning's class has none
        current=current,
        initial=initial,
        argument=values.get("_hparams_name") if values.get("_hparams_name") in _arguments(owner) else None,
        is_logged=bool(values.get("_log_hyperparams")),
    )


def _arguments(owner: object) -> tuple[str, ...]:
    """Return the arguments of a constructor; Lightning notes ``kwargs`` where each hyperparameter was one of them."""
    from dstrat.training.module.hyperparameters import Constructor

    return Constructor.of(type(owner)).names
