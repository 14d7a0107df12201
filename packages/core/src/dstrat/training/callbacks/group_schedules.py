"""Schedules of parameter groups that are added during a training.

torch's schedulers know the groups of their start only: most end in an error once there is another one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.parallel.internals import nested_schedulers

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch.optim import Optimizer

# What torch's schedulers keep in a group, and in lists with a value for each group.
_RATES_OF_GROUP = ("initial_lr", "max_lr", "min_lr", "swa_lr")
_MOMENTA_OF_GROUP = ("base_momentum", "max_momentum")
_LISTS_OF_RATES = ("base_lrs", "max_lrs")
_OTHER_LISTS = ("min_lrs", "lr_lambdas", "base_momentums", "max_momentums")


def schedule_groups(optimizer: Optimizer, start: int, share: float | None = None) -> None:
    """Let groups have what schedulers read in them, for rates in proportion to those of the first group.

    Args:
        optimizer: The optimizer.
        start: Index of the first of the groups.
        share: Their rate as a part of the first group's; None is the part that it is now.
    """
    first, *_ = groups = optimizer.param_groups
    # A schedule that starts at 0 is at 0 now, too.
    rate = float(first["lr"]) or float(first.get("initial_lr", 0.0)) or 1.0
    for group in groups[start:]:
        ratio = float(group["lr"]) / rate if share is None else share
        for key in (*_RATES_OF_GROUP, *_MOMENTA_OF_GROUP):
            if key in first:
                group.setdefault(key, first[key] * ratio if key in _RATES_OF_GROUP else first[key])


def extend_schedulers(schedulers: Iterable[Any]) -> None:
    """Let schedulers schedule the groups that their optimizers have got since, as the first group."""
    for scheduler, groups in _with_groups(schedulers):
        for name, values in _lists(scheduler):
            for group in groups[len(values) :]:
                values.append(values[0] * _ratio(group, groups[0]) if name in _LISTS_OF_RATES else values[0])


def scale_schedule(group: dict[str, Any], factor: float, schedulers: Iterable[Any]) -> None:
    """Multiply the rates of a group that schedulers have for the rest of the training."""
    for key in _RATES_OF_GROUP:
        if key in group:
            group[key] *= factor
    for scheduler, groups in _with_groups(schedulers):
        index = next((index for index, other in enumerate(groups) if other is group), None)
        for name, values in _lists(scheduler):
            if index is not None and name in _LISTS_OF_RATES:
                values[index] *= factor


def _with_groups(schedulers: Iterable[Any]) -> Iterator[tuple[Any, list[dict[str, Any]]]]:
    """Yield schedulers, and those in them, with the groups of their optimizers."""
    for scheduler in schedulers:
        for each in nested_schedulers(scheduler):
            groups = getattr(getattr(each, "optimizer", None), "param_groups", None)
            if groups:
                yield each, groups


def _lists(scheduler: Any) -> Iterator[tuple[str, list[Any]]]:
    for name in (*_LISTS_OF_RATES, *_OTHER_LISTS):
        values = getattr(scheduler, name, None)
        if isinstance(values, list) and values:
            yield name, values


def _ratio(group: dict[str, Any], first: dict[str, Any]) -> float:
    key = "initial_lr" if "initial_lr" in group and float(first.get("initial_lr", 0.0)) else "lr"
    return float(group[key]) / (float(first[key]) or 1.0)
