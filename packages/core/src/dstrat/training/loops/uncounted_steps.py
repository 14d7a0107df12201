"""Evaluation steps that a process runs only because others, which have more batches, communicate in theirs."""

from __future__ import annotations

import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dstrat.training.metrics.logged import LoggedValues
from dstrat.training.metrics.metric_entry import is_metric

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


def with_company(batches: Iterable[Any], others: Iterable[Any], strategy: Strategy) -> Iterator[tuple[Any, bool]]:
    """Yield this process's batches, and then others until every process is through; collective.

    Before each batch the processes agree on whether any of them has one, as their numbers may be unknown.

    Args:
        batches: What this process evaluates.
        others: Where it takes a batch from if it has none at all.
        strategy: Of which ``evaluates_together`` is True.

    Yields:
        A batch, and whether it counts.
    """
    iterator, nothing = iter(batches), object()
    last = nothing
    while True:
        batch = next(iterator, nothing)
        if not strategy.reduce_boolean_decision(batch is not nothing, all=False):
            return
        if batch is not nothing:
            last = batch
            yield batch, True
        else:
            last = next(iter(others)) if last is nothing else last
            yield last, False


@contextmanager
def uncounted(trainer: Trainer, module: TrainModule, batch: Any) -> Iterator[None]:
    """In this context nothing that a step logs or adds to a metric object is kept.

    Args:
        trainer: Whose logged values stay as they are.
        module: Whose metric objects do.
        batch: The batch of the step.
    """
    logged, trainer.logged = trainer.logged, LoggedValues(training=False)
    trainer.logged.start_epoch()
    trainer.logged.in_step, trainer.logged.batch = True, batch
    metrics: list[Any] = [part for part in module.modules() if is_metric(part)]
    states = [(copy.deepcopy(metric.metric_state), metric._update_count) for metric in metrics]  # noqa: SLF001 - torchmetrics offers no other way to set it back
    try:
        yield
    finally:
        trainer.logged = logged
        for metric, (state, count) in zip(metrics, states, strict=True):
            for name, value in state.items():
                setattr(metric, name, value)
            metric._update_count, metric._computed = count, None  # noqa: SLF001 - the same
