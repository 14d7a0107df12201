"""Publication of logged values to callbacks, progress bar and loggers."""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from dstrat.parallel.internals import change_count
from dstrat.training.loggers.defaults import call_loggers
from dstrat.training.metrics.logged import entry_of
from dstrat.training.metrics.metric_objects import MetricEntry
from dstrat.training.metrics.reduction import LocalSummary, exchange_epoch, exchange_steps
from dstrat.training.metrics.values import DATALOADER_SUFFIX, LoggedValue, NumberEntry

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence

    from torch import nn

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.metrics.logged import LoggedValues
    from dstrat.training.run import Run


SECONDS_BETWEEN_SAVES = 10.0


class Publisher:
    """Publication of step and epoch values to the loggers.

    Args:
        run: Has the loggers and :class:`Metrics`.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last_save = monotonic()

    def publish_step(self, logged: LoggedValues) -> None:
        """Write step values to the loggers; collective."""
        self._write(self._run.metrics.of_step(logged))

    def publish_evaluation_step(self, logged: LoggedValues, batches_seen: int) -> None:
        """Write the values of an evaluation step of this process, with the number of evaluated batches as the step."""
        values = self._run.metrics.of_local_step(logged)
        if not self._run.sanity_checking:
            self._write(values, step=batches_seen)

    def publish_epoch(self, logged: LoggedValues, hooks: Iterable[Callable[[], Any]]) -> None:
        """Reduce the values of the epoch, call the hooks at its end, and write all values to the loggers; collective.

        The hooks read the values, and may log more.
        """
        run, metrics = self._run, self._run.metrics
        metrics.start_epoch()
        values = metrics.of_epoch(logged)  # before the hooks, which read them
        for hook in hooks:
            hook()
        values |= metrics.of_epoch(logged)
        logged.end_epoch()
        if not run.sanity_checking:
            self._write(values)
            # Not after each epoch, as epochs may be short, and a flush may upload files.
            if monotonic() - self._last_save > SECONDS_BETWEEN_SAVES:
                call_loggers(run.loggers, "save")
                self._last_save = monotonic()

    def results(self, logged: LoggedValues, num_loaders: int) -> list[dict[str, float]]:
        """Return the values of an evaluation as numbers, a dict for each loader; collective."""
        values = self._run.metrics.as_numbers(self._run.metrics.latest_epoch)
        if num_loaders == 1:
            return [values]
        suffixes = [f"{DATALOADER_SUFFIX}{index}" for index in range(num_loaders)]
        loaders_of = self._run.strategy.broadcast(logged.loaders_of)  # this rank may have had no batch of a loader

        def is_of(name: str, suffix: str) -> bool:
            return name.endswith(suffix) if DATALOADER_SUFFIX in name else suffix in loaders_of.get(name, suffixes)

        return [{name: value for name, value in values.items() if is_of(name, suffix)} for suffix in suffixes]

    def _write(self, values: dict[str, float], *, step: int | None = None) -> None:
        if values:
            loop = self._run.fit_loop
            row = {"epoch": loop.epoch, **values}
            call_loggers(self._run.loggers, "log_metrics", row, loop.logged_step if step is None else step)


# The logged values of a run, for callbacks, loggers and the progress bar


class Metrics:
    """The latest value of each name, on its device until it is read.

    Args:
        strategy: Reads values from the device.

    Attributes:
        latest_epoch: The values of the last epoch of training or evaluation.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self._values: dict[str, Tensor | float] = {}
        self._shown: set[str] = set()
        self._shown_steps: dict[str, float] = {}  # of an earlier process, until the steps that log them run again
        self._written: set[str] = set()
        self._stages: list[LoggedValues] = []
        self.latest_epoch: dict[str, Tensor | float] = {}
        # Numbers of tensors as long as these live, with the version that was read: tensors may change in place.
        self._numbers: MutableMapping[Tensor, tuple[int, float]] = WeakTensorKeyDictionary()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_numbers": None}  # a cache, which cannot be pickled

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _numbers=WeakTensorKeyDictionary())

    def follow(self, logged: LoggedValues) -> None:
        """Read step values from a stage too; an earlier stage keeps its values.

        The newest value of a name counts: the stage's own ones of its last run may be older than those of others.
        """
        remaining = [stage for stage in self._stages if stage is not logged]
        newer = {e.step_name for stage in remaining for e in _steps(stage)}
        for entry in _steps(logged):
            if entry.step_name in newer:
                entry.supersede()
        self._stages = [*remaining, logged]

    # Reading

    @property
    def callback_values(self) -> dict[str, Tensor]:
        """The values of the last epochs and of the latest steps, by name; the newest of a name."""
        return {
            name: value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
            for name, value in self._latest().items()
        }

    def _latest(self) -> dict[str, Tensor | float]:
        steps = {e.step_name: e.step_value for stage in self._stages for e in _steps(stage)}
        return self._values | {name: value for name, value in steps.items() if value is not None}

    @property
    def written_values(self) -> dict[str, Tensor]:
        """The values that loggers write, by name."""
        written = self._written_names
        return {name: value for name, value in self.callback_values.items() if name in written}

    @property
    def _written_names(self) -> set[str]:
        of_steps = {e.step_name for stage in self._stages for e in stage.entries if e.on_step and e.is_written}
        return self._written | of_steps

    @property
    def shown_values(self) -> dict[str, float]:
        """The values that the progress bar shows, as numbers."""
        values = {name: value for name, value in self._values.items() if name in self._shown}
        return self.as_numbers(values | self._shown_steps | self._step_values_shown())

    def _step_values_shown(self) -> dict[str, Tensor | float]:
        return {e.name: e.shown_value for stage in self._stages for e in _steps(stage) if e.options.prog_bar}

    def as_numbers(self, values: Mapping[str, Tensor | float]) -> dict[str, float]:
        """Return values as plain numbers; those on a device are copied together, as each copy waits for the device.

        What a logger has read, the progress bar does not read again.
        """
        # By identity: "==" of tensors compares elements, and one value may have two names.
        tensors = {id(value): value for value in values.values() if isinstance(value, Tensor)}.values()
        unread = [tensor for tensor in tensors if self._numbers.get(tensor, (None,))[0] != change_count(tensor)]
        if unread:
            numbers = self._strategy.read_values(unread)
            for tensor, number in zip(unread, numbers, strict=True):
                self._numbers[tensor] = (change_count(tensor), number)
        return {
            name: self._numbers[value][1] if isinstance(value, Tensor) else float(value)
            for name, value in values.items()
        }

    # Collection of logged values

    def note(self, values: Mapping[str, float]) -> None:
        """Add values for callbacks, without passing them to loggers."""
        self._values |= values

    def of_step(self, logged: LoggedValues) -> dict[str, float]:
        """Return the step values that loggers write; collective."""
        return self.as_numbers(take_step(logged, self._strategy))

    def of_local_step(self, logged: LoggedValues) -> dict[str, float]:
        """Return the step values of this process, for evaluation, in which ranks have different numbers of steps."""
        return self.as_numbers(take_local_step(logged))

    def start_epoch(self) -> None:
        """Discard the values of the last epoch."""
        self.latest_epoch = {}

    def of_epoch(self, logged: LoggedValues) -> dict[str, float]:
        """Reduce the values of an epoch, and return those that loggers write; collective."""
        reduced = take_epoch(logged, self._strategy, self._strategy.module)
        self.latest_epoch |= {entry.epoch_name: value for entry, value in reduced}
        values = {name: value for entry, value in reduced for name in (entry.epoch_name, entry.name)}
        self._values |= values
        for step in (step for stage in self._stages for step in _steps(stage)):
            if step.step_name in values:
                step.supersede()
        self._shown |= {entry.epoch_name for entry, _ in reduced if entry.options.prog_bar}
        written = {entry.epoch_name: value for entry, value in reduced if entry.is_written}
        self._written |= written.keys()
        return self.as_numbers(written)

    def state_dict(self) -> dict[str, Any]:
        """Return the values as numbers, with their readers, for another process or a checkpoint."""
        values = self._latest()
        return {
            "values": self.as_numbers(values),
            "shown": sorted(self._shown),
            "written": sorted(self._written_names & values.keys()),
            # A resumed run may log them again only much later, as those of a validation.
            "shown_steps": self._shown_steps | self.as_numbers(self._step_values_shown()),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self._values |= state["values"]
        self._shown |= set(state["shown"])
        self._shown_steps |= state.get("shown_steps", {})  # older checkpoints have none
        self._written |= set(state["written"])


def _steps(stage: LoggedValues) -> list[LoggedValue]:
    """Return the entries of a stage whose step value is the newest of its name."""
    return [entry for entry in stage.entries if entry.on_step and not entry.is_superseded]


# Reduction of the values of a step or an epoch over all ranks


Values = list[tuple[LoggedValue, "Tensor | float"]]


def take_step(logged: LoggedValues, strategy: Strategy) -> dict[str, Tensor | float]:
    """Return the step values since the last call that loggers write, by name; collective.

    Raises:
        MisuseError: Ranks have logged different names with ``sync_dist=True``.
    """
    if strategy.world_size > 1:
        # All ranks come here, also one without such values: it has to take part.
        shared = _sorted(entry for entry in _fresh(logged) if isinstance(entry, NumberEntry) and entry.sync_step)
        summary = LocalSummary({e.name: e.resolved for e in shared}, [e.step_share for e in shared])
        values = exchange_steps(summary, strategy)
        for entry in shared:
            entry.reduced = values[entry.step_name]
    return take_local_step(logged)


def take_local_step(logged: LoggedValues) -> dict[str, Tensor | float]:
    """Return the same without a collective: the values of this process, and those that were reduced before."""
    fresh = _fresh(logged)
    for entry in fresh:
        entry.is_fresh = False
    return {e.step_name: value for e in fresh if e.is_written and (value := e.step_value) is not None}


def take_epoch(logged: LoggedValues, strategy: Strategy, module: nn.Module) -> Values:
    """Return the values of the epoch, reduced over all ranks, and reset the totals; collective.

    Metric objects keep their state for the hooks at the end of the epoch; ``logged.reset_metrics`` follows these.

    Args:
        logged: The logged values.
        strategy: Has the collectives.
        module: Has the metric objects.

    Raises:
        MisuseError: Ranks have logged different names.
    """
    entries = _sorted(entry for entry in logged.entries if entry.was_logged)
    if strategy.world_size == 1:
        values = _local_values(entries)
        metrics = [entry for entry in entries if isinstance(entry, MetricEntry)]
    else:
        values, metrics = _reduced_values(entries, logged, strategy, module)
    values += [(entry, entry.compute()) for entry in metrics if entry.on_epoch]
    logged.computed_metrics += metrics
    logged.forget()
    return values


def _local_values(entries: Iterable[LoggedValue]) -> Values:
    return [(e, e.local_epoch_value) for e in entries if isinstance(e, NumberEntry) and e.on_epoch]


def _reduced_values(
    entries: Sequence[LoggedValue], logged: LoggedValues, strategy: Strategy, module: nn.Module
) -> tuple[Values, list[MetricEntry]]:
    """Return the values of the epoch, and the metric objects to compute, which is collective."""
    local = _local_values(entry for entry in entries if isinstance(entry, NumberEntry) and not entry.sync_epoch)
    numbers = [e for e in entries if isinstance(e, NumberEntry) and (e.sync_epoch or e.sync_step)]
    metrics = [entry for entry in entries if isinstance(entry, MetricEntry)]
    names = {entry.name: entry.resolved for entry in (*numbers, *metrics)}
    shares = [e.epoch_share for e in numbers if e.sync_epoch] + [e.step_share for e in numbers if e.sync_step]
    had_data = logged.has_batches and not logged.lacks_a_loader
    exchanged = exchange_epoch(LocalSummary(names, shares, had_data, logged.has_batches), strategy)
    if exchanged.names is not names:  # this rank lacks names, and takes part in their reduction with its peers' names
        peers = [entry_of(name, options, module) for name, options in exchanged.names.items()]
        numbers = [entry for entry in peers if isinstance(entry, NumberEntry)]
        metrics = [entry for entry in peers if isinstance(entry, MetricEntry)]
    for entry in numbers:
        if entry.sync_step:
            entry.reduced = exchanged.values[entry.step_name]
    reduced: Values = [(entry, exchanged.values[entry.epoch_name]) for entry in numbers if entry.sync_epoch]
    return local + reduced, metrics


def _fresh(logged: LoggedValues) -> list[LoggedValue]:
    return [entry for entry in logged.entries if entry.is_fresh and entry.on_step]


def _sorted(entries: Any) -> list[Any]:
    """Return entries sorted by name, an order that is the same on all ranks."""
    return sorted(entries, key=lambda entry: entry.name)
