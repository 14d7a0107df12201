"""The logged values of a run, for callbacks, loggers and the progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.training.metrics.taking import take_epoch, take_own_step, take_step

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.metrics.logged import LoggedValues


class Metrics:
    """The latest value of each name; what is on a device stays there until it is read.

    Args:
        strategy: Reads values from the device.

    Attributes:
        latest_epoch: The values over the last epoch of training or evaluation.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._values: dict[str, Tensor | float] = {}
        self._shown: set[str] = set()
        self._written: set[str] = set()
        self._stages: list[LoggedValues] = []
        self.latest_epoch: dict[str, Tensor | float] = {}

    def follow(self, logged: LoggedValues) -> None:
        """Take the values of steps from a stage too; those of an earlier one stay what they are."""
        self._stages = [*(stage for stage in self._stages if stage is not logged), logged]

    # Reading

    @property
    def callback_values(self) -> dict[str, Tensor]:
        """The values over the last epochs, and those of the latest steps."""
        steps = {e.step_name: e.step_value for stage in self._stages for e in stage.entries if e.on_step}
        return _as_tensors(self._values | {name: value for name, value in steps.items() if value is not None})

    @property
    def written_values(self) -> dict[str, Tensor]:
        """Those of them that loggers write."""
        names = {e.step_name for stage in self._stages for e in stage.entries if e.on_step and e.is_written}
        return {name: value for name, value in self.callback_values.items() if name in names or name in self._written}

    @property
    def shown_values(self) -> dict[str, float]:
        """What the progress bar shows, as numbers."""
        values = {name: value for name, value in self._values.items() if name in self._shown}
        for stage in self._stages:
            values |= {e.name: e.shown_value for e in stage.entries if e.on_step and e.options.prog_bar}
        return self.as_numbers(values)

    def as_numbers(self, values: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Return the values as plain numbers; those on a device are read in one copy."""
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        numbers = {name: float(value) for name, value in values.items() if not isinstance(value, Tensor)}
        if tensors:
            numbers |= zip(tensors, self._strategy.read_values([*tensors.values()]), strict=True)
        return {name: numbers[name] for name in values}

    # Taking what was logged

    def note(self, values: Mapping[str, float]) -> None:
        """Let callbacks know values that loggers get in another way."""
        self._values |= values

    def of_step(self, logged: LoggedValues) -> dict[str, float]:
        """Return the values of steps that loggers write; collective."""
        return self.as_numbers(take_step(logged, self._strategy))

    def of_own_step(self, logged: LoggedValues) -> dict[str, float]:
        """Return the same of this process alone, as in evaluation, where processes differ in their steps."""
        return self.as_numbers(take_own_step(logged))

    def start_epoch(self) -> None:
        """Begin to collect the values over another epoch."""
        self.latest_epoch = {}

    def of_epoch(self, logged: LoggedValues) -> dict[str, float]:
        """Reduce what was logged over an epoch, keep it, and return what loggers write of it; collective."""
        taken = take_epoch(logged, self._strategy, self._strategy.module)
        self.latest_epoch |= {entry.epoch_name: value for entry, value in taken}
        self._values |= {name: value for entry, value in taken for name in (entry.epoch_name, entry.name)}
        self._shown |= {entry.epoch_name for entry, _ in taken if entry.options.prog_bar}
        written = {entry.epoch_name: value for entry, value in taken if entry.is_written}
        self._written |= written.keys()
        return self.as_numbers(written)

    def state_dict(self) -> dict[str, Any]:
        """Return the values as numbers, and who reads which of them; for another process or a checkpoint."""
        names = {"shown": sorted(self._shown), "written": sorted(self.written_values)}
        return {"values": self.as_numbers(self.callback_values), **names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what :meth:`state_dict` returned."""
        self._values |= state["values"]
        self._shown |= set(state["shown"])
        self._written |= set(state["written"])


def _as_tensors(values: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    return {
        name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        for name, value in values.items()
    }
