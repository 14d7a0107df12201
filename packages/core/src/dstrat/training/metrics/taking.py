"""Taking the values of a step or an epoch out of what was logged, reduced over all processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.training.metrics.entry import Entry
from dstrat.training.metrics.logged import entry_of
from dstrat.training.metrics.metric_entry import MetricEntry
from dstrat.training.metrics.number_entry import NumberEntry
from dstrat.training.metrics.reduction import Statement, exchange_epoch, exchange_steps

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor, nn

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.metrics.logged import LoggedValues

Values = list[tuple[Entry, "Tensor | float"]]


def take_step(logged: LoggedValues, strategy: Strategy) -> dict[str, Tensor | float]:
    """Return what loggers write of the values logged in steps since this was last called, by name; collective.

    Raises:
        MisuseError: The processes logged different names with ``sync_dist=True``.
    """
    if strategy.world_size > 1:
        shared = _sorted(entry for entry in _fresh(logged) if isinstance(entry, NumberEntry) and entry.sync_step)
        statement = Statement({e.name: e.resolved for e in shared}, [e.step_share for e in shared])
        values = exchange_steps(statement, strategy)
        for entry in shared:
            entry.reduced = values[entry.step_name]
    return take_own_step(logged)


def take_own_step(logged: LoggedValues) -> dict[str, Tensor | float]:
    """Return the same without reducing anything: the values of this process, and those that were reduced before."""
    fresh = _fresh(logged)
    for entry in fresh:
        entry.is_fresh = False
    return {e.step_name: value for e in fresh if e.is_written and (value := e.step_value) is not None}


def take_epoch(logged: LoggedValues, strategy: Strategy, module: nn.Module) -> Values:
    """Return what was logged over the epoch, reduced over all processes, and forget it; collective.

    Metric objects still hold the epoch, for the hooks at its end: ``logged.reset_metrics`` is called after them.

    Args:
        logged: What the module logged.
        strategy: Whose processes take part.
        module: Has the metric objects.

    Raises:
        MisuseError: The processes logged different names.
    """
    entries = _sorted(entry for entry in logged.entries if entry.was_logged)
    if strategy.world_size == 1:
        values = _own_values(entries)
        metrics = [entry for entry in entries if isinstance(entry, MetricEntry)]
    else:
        values, metrics = _reduced_values(entries, logged, strategy, module)
    values += [(entry, entry.compute()) for entry in metrics if entry.on_epoch]
    logged.computed_metrics += metrics
    logged.forget()
    return values


def _own_values(entries: Iterable[Entry]) -> Values:
    return [(e, e.own_epoch_value) for e in entries if isinstance(e, NumberEntry) and e.on_epoch]


def _reduced_values(
    entries: Sequence[Entry], logged: LoggedValues, strategy: Strategy, module: nn.Module
) -> tuple[Values, list[MetricEntry]]:
    """Return the values over the epoch, and the metric objects that all processes have to compute together."""
    own = _own_values(entry for entry in entries if isinstance(entry, NumberEntry) and not entry.sync_epoch)
    numbers = [e for e in entries if isinstance(e, NumberEntry) and (e.sync_epoch or e.sync_step)]
    metrics = [entry for entry in entries if isinstance(entry, MetricEntry)]
    names = {entry.name: entry.resolved for entry in (*numbers, *metrics)}
    shares = [e.epoch_share for e in numbers if e.sync_epoch] + [e.step_share for e in numbers if e.sync_step]
    had_data = logged.has_batches and not logged.lacks_a_loader
    agreement = exchange_epoch(Statement(names, shares, had_data), strategy)
    if agreement.names is not names:  # this process lacks some, and takes its peers' names
        peers = [entry_of(name, options, module) for name, options in agreement.names.items()]
        numbers = [entry for entry in peers if isinstance(entry, NumberEntry)]
        metrics = [entry for entry in peers if isinstance(entry, MetricEntry)]
    for entry in numbers:
        if entry.sync_step:
            entry.reduced = agreement.values[entry.step_name]
    reduced: Values = [(entry, agreement.values[entry.epoch_name]) for entry in numbers if entry.sync_epoch]
    return own + reduced, metrics


def _fresh(logged: LoggedValues) -> list[Entry]:
    return [entry for entry in logged.entries if entry.is_fresh and entry.on_step]


def _sorted(entries: Any) -> list[Any]:
    """Return the entries in the order in which every process takes them."""
    return sorted(entries, key=lambda entry: entry.name)
