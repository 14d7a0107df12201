"""The logged values of a run, for callbacks, loggers and the progress bar."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.metrics.logged import LoggedValues


class Metrics:
    """The latest value of each name; tensors stay on their device until they are read.

    Attributes:
        latest_epoch: The values over the last epoch of training or evaluation.
    """

    def __init__(self) -> None:
        self._values: dict[str, Tensor | float] = {}
        self.latest_epoch: dict[str, Tensor | float] = {}
        self._shown: set[str] = set()

    def all(self, logged: LoggedValues) -> dict[str, Tensor | float]:
        """Return the values over the last epochs, and those of the latest step."""
        return self._values | logged.latest_values()

    def shown(self, logged: LoggedValues) -> dict[str, float]:
        """Return what the progress bar shows, as numbers."""
        values = {name: value for name, value in self._values.items() if name in self._shown}
        return as_numbers(values | logged.latest_shown())

    def of_step(self, logged: LoggedValues, strategy: Strategy) -> dict[str, float]:
        """Return the values of a step that loggers write; collective where one is synchronised."""
        return as_numbers(logged.step_values(strategy))

    def start_epoch(self) -> None:
        """Begin to collect the values over another epoch."""
        self.latest_epoch = {}

    def of_epoch(self, logged: LoggedValues, strategy: Strategy) -> dict[str, float]:
        """Reduce what was logged over an epoch, keep it, and return what loggers write of it; collective."""
        values = logged.take_epoch_values(strategy)
        plain_names = logged.plain_names()
        self._values |= values | {plain_names[name]: value for name, value in values.items() if name in plain_names}
        self.latest_epoch |= values
        self._shown |= logged.names_for_progress_bar()
        written = logged.names_for_logger()
        return as_numbers({name: value for name, value in values.items() if name in written})

    def take(self, values: Mapping[str, float]) -> None:
        """Take the values of another process."""
        self._values |= values


def as_numbers(values: Mapping[str, Tensor | float]) -> dict[str, float]:
    """Return the values as plain numbers; those on a device are read in one copy."""
    tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
    numbers = {name: float(value) for name, value in values.items() if not isinstance(value, Tensor)}
    if tensors:
        stacked = torch.stack([value.reshape(()).to(torch.float64) for value in tensors.values()])
        numbers |= dict(zip(tensors, stacked.tolist(), strict=True))
    return {name: numbers[name] for name in values}
