"""Learning rates for the loggers."""

from __future__ import annotations

import logging
import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from typing_extensions import override

from dstrat.errors import MisuseError, RequestError
from dstrat.training.callbacks.callback import Callback
from dstrat.training.loggers.defaults import call_loggers

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

Interval = Literal["step", "epoch"]

_log = logging.getLogger(__name__)


class LearningRateMonitor(Callback):
    """Write the learning rate of each optimizer and parameter group to the loggers.

    Names are ``lr-AdamW``, for a second optimizer of that class ``lr-AdamW-1``, and with several parameter groups
    ``lr-AdamW/pg1``, ``lr-AdamW/pg2``.  The ``name`` in a scheduler's dict replaces ``lr-AdamW``, that of a parameter
    group replaces ``pg1``.  A rate is written with the number of the step that uses it, every ``log_every_n_steps``.
    ``trainer.callback_metrics`` has the latest rates on every rank.  Groups that a callback adds later are written too.

    Args:
        logging_interval: ``"step"``, or ``"epoch"`` for the rate at the start of each epoch; None is the interval of
            each optimizer's schedulers; without one it is ``"step"``, and the start of epochs in which no step is
            written.
        log_momentum: Whether to write the momentum too (for Adam the first beta), as ``...-momentum``.
        log_weight_decay: Whether to write the weight decay too, as ``...-weight_decay``.

    Attributes:
        lrs: The written rates of the last fit, by name, in the order of the steps.

    Raises:
        RequestError: The interval is not one of these.
        MisuseError: Two groups of an optimizer have the same name; raised at the start of a fit.
    """

    retired_members: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("last_momentum_values", "last_weight_decay_values"), "trainer.callback_metrics has the latest values"
    )

    def __init__(
        self,
        logging_interval: Interval | None = None,
        log_momentum: bool = False,
        log_weight_decay: bool = False,
    ) -> None:
        if logging_interval not in (None, "step", "epoch"):
            raise RequestError(f"logging_interval={logging_interval!r} must be 'step', 'epoch' or None")
        self.logging_interval = logging_interval
        self.log_momentum, self.log_weight_decay = log_momentum, log_weight_decay
        self.lrs: dict[str, list[float]] = {}
        self._due_at_step: float = math.inf
        self._written_at_step = -1
        self._restored_step: int | None = None

    @override
    def state_dict(self) -> dict[str, Any]:
        # A batch of manual optimization may take several steps: no multiple of log_every_n_steps tells.
        return {"written_at_step": self._written_at_step}

    @override
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._restored_step = state_dict.get("written_at_step")

    @override
    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        if not trainer.loggers and trainer.is_global_zero:
            _log.warning("LearningRateMonitor writes nothing, as the Trainer has no logger")
        self.lrs = {group.name: [] for group in _groups(trainer.strategy)}
        step, every = trainer.global_step, trainer.log_every_n_steps
        # Where a run resumes between the batches of a step, the run before has written the step's rates.
        begun = step + (trainer.fit_loop.in_group > 0)
        written, self._restored_step = self._restored_step, None
        if written is None or written > begun:  # no state, or that of an evaluation before this fit
            written = begun // every * every or -1 if every else -1
        self._set_due(trainer, max(written, 0))
        self._written_at_step = written

    @override
    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        if trainer.fit_loop.batches_done:  # resumed within the epoch, whose start was written before
            return
        step = trainer.global_step
        is_written_anyway = step == self._written_at_step or step + 1 == self._due_at_step
        self._write(trainer, ("epoch",) if is_written_anyway else ("epoch", None), step)

    @override
    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> None:
        step = trainer.global_step + 1  # the step that uses the rate
        if step >= self._due_at_step:
            self._set_due(trainer, step)
            self._write(trainer, ("step", None), step)
            self._written_at_step = step

    def _set_due(self, trainer: Trainer, step: int) -> None:
        every = trainer.log_every_n_steps  # 0 where nothing is written in steps
        self._due_at_step = (step // every + 1) * every if self.lrs and every else math.inf

    def _write(self, trainer: Trainer, intervals: tuple[Interval | None, ...], step: int) -> None:
        values: dict[str, float] = {}
        for group in _groups(trainer.strategy):  # each time, since callbacks such as BaseFinetuning add groups
            if (self.logging_interval or group.interval) in intervals:
                values |= self._values(group)
                self._rates_of(group.name).append(values[group.name])
        if values:
            trainer.metrics.note(values)  # on every rank, since callbacks may monitor a rate
        if values and trainer.is_global_zero:
            call_loggers(trainer.loggers, "log_metrics", {"epoch": trainer.current_epoch, **values}, step)

    def _rates_of(self, name: str) -> list[float]:
        """Return the written rates of a group, which was the only one of its optimizer before ``/pg1`` had a name."""
        if name not in self.lrs and name.endswith("/pg1"):
            self.lrs[name] = self.lrs.pop(name.removesuffix("/pg1"), [])
        return self.lrs.setdefault(name, [])

    def _values(self, group: _Group) -> dict[str, float]:
        settings = group.settings
        values = {group.name: float(settings["lr"])}
        if self.log_momentum:  # Adam's first beta, or SGD's momentum
            values[f"{group.name}-momentum"] = float(settings.get("betas", (settings.get("momentum", 0.0),))[0])
        if self.log_weight_decay:
            values[f"{group.name}-weight_decay"] = float(settings.get("weight_decay", 0.0))
        return values


@dataclass(frozen=True, kw_only=True, slots=True)
class _Group:
    """A parameter group.

    Attributes:
        name: Name of the rate in loggers.
        settings: The entry in the optimizer's ``param_groups``, which schedulers change.
        interval: The interval at which the rate is written; None without a scheduler.
    """

    name: str
    settings: Mapping[str, Any]
    interval: Interval | None


def _groups(strategy: Strategy) -> Iterator[_Group]:
    used: Counter[str] = Counter()
    for optimizer in strategy.optimizers:
        # A scheduler without the attribute ``optimizer`` belongs to the only optimizer.
        only = optimizer if len(strategy.optimizers) == 1 else None
        configs = [c for c in strategy.lr_schedulers if getattr(c.scheduler, "optimizer", only) is optimizer]
        name = next((config.name for config in configs if config.name), f"lr-{type(optimizer).__name__}")
        used[name] += 1
        if used[name] > 1:
            name = f"{name}-{used[name] - 1}"
        interval: Interval | None = None
        if configs:
            interval = "step" if any(config.interval == "step" for config in configs) else "epoch"
        several = len(optimizer.param_groups) > 1
        names = [
            settings.get("name", f"pg{number}" if several else None)
            for number, settings in enumerate(optimizer.param_groups, 1)
        ]
        if shared := [group_name for group_name, times in Counter(names).items() if times > 1]:
            raise MisuseError(
                f"several parameter groups of {type(optimizer).__name__} have the name {shared[0]!r}, by which "
                "LearningRateMonitor writes the rate of each: give them different names"
            )
        for group_name, settings in zip(names, optimizer.param_groups, strict=True):
            yield _Group(name=f"{name}/{group_name}" if group_name else name, settings=settings, interval=interval)
