"""Optimizers and schedulers: results of ``configure_optimizers`` in one form, and a check of clipping."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal

from dstrat.errors import MisuseError, RequestError

if TYPE_CHECKING:
    from torch.optim import Optimizer

_SHAPES = (
    "an optimizer, a list of optimizers, (optimizers, schedulers), "
    'or a dict with "optimizer" and, if wanted, "lr_scheduler"'
)


@dataclass(kw_only=True, slots=True)
class SchedulerConfig:
    """A learning-rate scheduler and when it is stepped.

    Attributes:
        scheduler: Anything with ``step``, ``state_dict`` and ``load_state_dict``.
        interval: Step it after an optimizer step, or after an epoch.
        frequency: Step it every so many of those.
        monitor: Name of the logged value that is passed to ``step``; None passes nothing.
        strict: Whether a missing monitored value is an error.
        name: Name under which its learning rate is logged.
        reduce_on_plateau: Whether ``step`` takes the monitored value.  None leaves it to the scheduler: those of torch
            do not take one, but for ReduceLROnPlateau; others do where ``monitor`` is given.
    """

    scheduler: Any
    interval: Literal["step", "epoch"] = "epoch"
    frequency: int = 1
    monitor: str | None = None
    strict: bool = True
    name: str | None = None
    reduce_on_plateau: bool | None = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.scheduler, "step", None)):
            raise MisuseError(f"a scheduler needs a step method, and {self.scheduler!r} has none")
        if isinstance(self.scheduler, type):
            name = self.scheduler.__name__
            raise MisuseError(
                f"configure_optimizers returned the class {name}: make an instance, {name}(optimizer, ...)"
            )
        if self.interval not in ("step", "epoch"):
            raise MisuseError(f"interval {self.interval!r} of a scheduler is not 'step' or 'epoch'")
        if not isinstance(self.frequency, int) or self.frequency < 1:
            raise MisuseError(f"frequency {self.frequency!r} of a scheduler must be an int of at least 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimization:
    """The optimizers of a module and their schedulers."""

    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[SchedulerConfig, ...] = ()


def read_optimizers(returned: Any, *, steps_schedulers: bool = True) -> Optimization:
    """Return the optimizers and schedulers in a result of ``configure_optimizers``.

    Args:
        returned: None, an optimizer, a dict, a sequence of either, or a pair of optimizers and schedulers.
        steps_schedulers: Whether schedulers are stepped automatically, for which some need a monitored value.

    Raises:
        MisuseError: The result has none of these forms, or a scheduler belongs to another optimizer.
    """
    optimization = _read(returned)
    for config in optimization.schedulers:
        _check_owner(config.scheduler, optimization.optimizers)
        if steps_schedulers:
            _settle_monitor(config)
    return optimization


def _check_owner(scheduler: Any, optimizers: Sequence[Optimizer]) -> None:
    """Refuse a scheduler that would change the learning rates of another optimizer than those returned."""
    scheduled: Any = getattr(scheduler, "optimizer", None)
    if not _is_optimizer(scheduled):
        return  # unknown, as it has no attribute ``optimizer``
    groups = {id(group) for optimizer in optimizers for group in optimizer.param_groups}
    if not any(id(group) in groups for group in scheduled.param_groups):  # one that wraps another shares its groups
        raise MisuseError(
            f"configure_optimizers returned a {type(scheduler).__name__} of another {type(scheduled).__name__} than "
            "those it returned, so that it would have no effect: make the scheduler with the optimizer that is returned"
        )


def _read(returned: Any) -> Optimization:
    if returned is None:
        return Optimization()
    if _is_optimizer(returned):
        return Optimization(optimizers=(returned,))
    if isinstance(returned, Mapping):
        return _read_dict(returned)
    if isinstance(returned, Sequence) and not isinstance(returned, str):
        return _read_sequence(returned)
    if isinstance(returned, type):
        name = returned.__name__
        raise MisuseError(
            f"configure_optimizers returned the class {name}: make an instance, {name}(self.parameters(), ...)"
        )
    raise MisuseError(f"configure_optimizers returned {returned!r}; it must return {_SHAPES}")


def _read_sequence(returned: Sequence[Any]) -> Optimization:
    # A pair of optimizers and schedulers; two optimizers, or two dicts of them, are a list of results.
    if len(returned) == 2 and isinstance(returned[0], list | tuple) and not _has_optimizer(returned[1]):
        optimizers, schedulers = returned
        if not isinstance(schedulers, list | tuple):
            schedulers = [] if schedulers is None else [schedulers]
        return Optimization(
            optimizers=tuple(map(_optimizer, optimizers)), schedulers=tuple(map(_scheduler, schedulers))
        )
    results = [_read(item) for item in returned]
    return Optimization(
        optimizers=tuple(optimizer for result in results for optimizer in result.optimizers),
        schedulers=tuple(scheduler for result in results for scheduler in result.schedulers),
    )


def _has_optimizer(value: Any) -> bool:
    return _is_optimizer(value) or (isinstance(value, Mapping) and "optimizer" in value)


def _read_dict(returned: Mapping[str, Any]) -> Optimization:
    unknown = sorted(set(returned) - {"optimizer", "lr_scheduler", "monitor"})
    if "optimizer" not in returned or unknown:
        problem = f"has unknown keys {unknown}" if unknown else 'has no "optimizer"'
        raise MisuseError(f"the dict that configure_optimizers returned {problem}; it must return {_SHAPES}")
    optimizer = _optimizer(returned["optimizer"])
    if returned.get("lr_scheduler") is None:
        return Optimization(optimizers=(optimizer,))
    config = _scheduler(returned["lr_scheduler"])
    config.monitor = config.monitor or returned.get("monitor")
    return Optimization(optimizers=(optimizer,), schedulers=(config,))


def _scheduler(value: Any) -> SchedulerConfig:
    if isinstance(value, SchedulerConfig):
        return value
    if not isinstance(value, Mapping):
        return SchedulerConfig(scheduler=value)
    possible = [field.name for field in fields(SchedulerConfig)]
    unknown = sorted(set(value) - set(possible))
    if "scheduler" not in value or unknown:
        problem = f"has unknown keys {unknown}" if unknown else 'has no "scheduler"'
        raise MisuseError(f"a scheduler's dict {problem}; possible keys are {', '.join(possible)}")
    return SchedulerConfig(**value)


def _settle_monitor(config: SchedulerConfig) -> None:
    """Set whether the scheduler takes the monitored value; clear ``monitor`` if it does not."""
    from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

    name, requested = type(config.scheduler).__name__, config.reduce_on_plateau
    must_watch = isinstance(config.scheduler, ReduceLROnPlateau)
    # ``step`` of torch's schedulers would take the value for a number of epochs.
    watches = requested is True or must_watch or not isinstance(config.scheduler, LRScheduler)
    if config.monitor is None and (requested or must_watch):
        raise MisuseError(
            f"{name} needs a value to watch: return "
            '{"optimizer": ..., "lr_scheduler": {"scheduler": ..., "monitor": "val_loss"}} from configure_optimizers'
        )
    if requested is False and must_watch:
        raise MisuseError(f"{name} takes the monitored value, and has reduce_on_plateau=False: leave it out")
    if config.monitor is not None and requested is None and not watches:
        raise MisuseError(
            f"{name} takes no value, and has monitor={config.monitor!r}: leave it out, "
            "or pass reduce_on_plateau=True where its step takes one"
        )
    if requested is False:
        config.monitor = None
    config.reduce_on_plateau = config.monitor is not None


def _optimizer(value: Any) -> Optimizer:
    if not _is_optimizer(value):
        raise MisuseError(f"configure_optimizers returned {value!r} where an optimizer is expected")
    return value  # type: ignore[no-any-return]  # checked on the line above


def _is_optimizer(value: Any) -> bool:
    from torch.optim import Optimizer

    return isinstance(value, Optimizer)


def check_clipping(value: Any, algorithm: Any) -> None:
    """Raise a RequestError unless a value and an algorithm can clip gradients; None and 0 clip nothing."""
    if algorithm not in ("norm", "value"):
        raise RequestError(f"gradient_clip_algorithm={algorithm!r} must be 'norm' or 'value'")
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not None and (not number or not value >= 0):  # "not >=" is True for NaN too
        raise RequestError(f"gradient_clip_val={value!r} must be a positive number, or None or 0 to clip nothing")
