"""Detecting anomalies in a fit: what is watched, and the batch that is named."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dstrat.training.anomaly import AnomalyDetection

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


@contextmanager
def watched_fit(trainer: Trainer, module: TrainModule) -> Iterator[None]:
    """In this context a loss or an output that is NaN is an error, if the Trainer was asked for that."""
    if not trainer.detect_anomaly:
        yield
        return
    place = _Place(trainer)
    with AnomalyDetection(module, place.describe) as anomalies:
        trainer.dispatch.insert("on_before_backward", anomalies.check_loss)
        trainer.dispatch.insert("on_validation_batch_start", place.note_validation_batch)
        yield


class _Place:
    """Where a fit is, for people."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._validation_batch = ""

    def note_validation_batch(self, batch: Any, batch_idx: int, dataloader_idx: int | None = None) -> None:  # noqa: ARG002 - a hook
        of_loader = "" if dataloader_idx is None else f" of loader {dataloader_idx}"
        self._validation_batch = f"batch {batch_idx}{of_loader}"

    def describe(self) -> str:
        trainer = self._trainer
        batch = f"batch {trainer.fit_loop.batch_idx}"
        if trainer.is_evaluating:
            batch = f"{'sanity check' if trainer.sanity_checking else 'validation'} {self._validation_batch}"
        return f"epoch {trainer.current_epoch}, {batch}, rank {trainer.global_rank}"
