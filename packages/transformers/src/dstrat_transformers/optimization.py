"""Optimizers with groups of weight decay, and the schedulers of transformers by their names."""

from __future__ import annotations

import inspect
import math
import re
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from dstrat.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch.nn import Module, Parameter

_NOT_DECAYED = [re.compile(pattern) for pattern in (r"bias", r"layernorm", r"rmsnorm", r"(^|\.|_)norm($|\.)")]
"""Names, in lower case, of parameters without weight decay; those of transformers' Trainer."""

_WITHOUT_LENGTH = ("constant", "constant_with_warmup", "inverse_sqrt", "reduce_lr_on_plateau")
"""Schedulers that do not depend on the number of training steps."""


def weight_decay_groups(model: Module, weight_decay: float) -> list[dict[str, Any]]:
    """Return the trainable parameters in two groups: with weight decay, and without (biases and normalizations).

    Args:
        model: The model; parameters that are shared count once.
        weight_decay: The weight decay of the first group.

    Returns:
        Groups for an optimizer, without empty ones.
    """
    norms = {
        id(parameter)
        for layer in model.modules()
        if isinstance(layer, nn.LayerNorm)
        for parameter in layer.parameters()
    }
    decayed: list[Parameter] = []
    not_decayed: list[Parameter] = []
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        is_excluded = id(parameter) in norms or any(pattern.search(name.lower()) for pattern in _NOT_DECAYED)
        (not_decayed if is_excluded else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": not_decayed, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def make_optimizer(
    model: Module,
    optimizer: str | Callable[..., Optimizer] = "adamw",
    *,
    learning_rate: float = 5e-5,
    weight_decay: float = 0.0,
    optimizer_kwargs: Mapping[str, Any] | None = None,
) -> Optimizer:
    """Return an optimizer of a model's trainable parameters.

    Args:
        model: The model, on its device, sharded or not.
        optimizer: The name of a class in ``torch.optim``, in any case; or a class or function that takes groups of
            parameters and ``lr``.
        learning_rate: The learning rate, before a scheduler.
        weight_decay: Of all parameters but biases and those of normalizations.
        optimizer_kwargs: Further arguments of the optimizer.

    Raises:
        RequestError: There is no such optimizer, or the model has nothing to train.
    """
    make = _optimizer_class(optimizer) if isinstance(optimizer, str) else optimizer
    groups = weight_decay_groups(model, weight_decay)
    if not groups:
        raise RequestError(f"{type(model).__name__} has no parameter that requires a gradient: unfreeze some")
    return make(groups, lr=learning_rate, **(optimizer_kwargs or {}))


def _optimizer_class(name: str) -> Any:
    classes = {
        key.lower(): value
        for key, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, Optimizer) and value is not Optimizer
    }
    if name.lower() not in classes:
        raise RequestError(
            f"optimizer={name!r} is not a class of torch.optim: name one of {', '.join(sorted(classes))}, or pass a "
            "function that takes groups of parameters and lr"
        )
    return classes[name.lower()]


def make_scheduler(
    optimizer: Optimizer,
    scheduler: str = "linear",
    *,
    num_training_steps: float | None = None,
    warmup_steps: float = 0,
    scheduler_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """Return a scheduler of transformers, to be stepped after each optimizer step.

    Args:
        optimizer: The optimizer.
        scheduler: A name of ``transformers.get_scheduler``, such as ``"linear"``, ``"cosine"`` or
            ``"constant_with_warmup"``.
        num_training_steps: Optimizer steps of the whole training.
        warmup_steps: Optimizer steps of the warm-up, or below 1 their share of the whole training.
        scheduler_kwargs: Further arguments of the scheduler, such as ``{"num_cycles": 2}``.

    Raises:
        RequestError: The name is unknown, or the scheduler needs the number of steps, which is not known.
    """
    from transformers import get_scheduler
    from transformers.trainer_utils import SchedulerType

    names = sorted(kind.value for kind in SchedulerType)
    if scheduler not in names:
        raise RequestError(f"scheduler={scheduler!r} is unknown to transformers, which has {', '.join(names)}")
    steps = None if num_training_steps is None or math.isinf(num_training_steps) else int(num_training_steps)
    if steps is None and (scheduler not in _WITHOUT_LENGTH or 0 < warmup_steps < 1):
        raise RequestError(
            f"scheduler={scheduler!r} with warmup_steps={warmup_steps!r} needs the number of training steps, which is "
            "not known here: give num_training_steps, or max_steps to the Trainer"
        )
    # A share is rounded up, as by transformers' TrainingArguments.
    warmup = int(warmup_steps) if warmup_steps >= 1 else math.ceil((steps or 0) * warmup_steps)
    return get_scheduler(
        scheduler,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=steps,
        scheduler_specific_kwargs=dict(scheduler_kwargs or {}),
    )


def scheduler_config(scheduler: Any, monitor: str) -> dict[str, Any]:
    """Return a scheduler as ``configure_optimizers`` of a module returns it.

    Args:
        scheduler: The result of :func:`make_scheduler`.
        monitor: The logged value that a scheduler reads which waits for a plateau.
    """
    if isinstance(scheduler, ReduceLROnPlateau):
        return {"scheduler": scheduler, "interval": "epoch", "monitor": monitor}
    return {"scheduler": scheduler, "interval": "step"}
