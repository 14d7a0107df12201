"""Writing predictions while they are made, each process its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, get_args

import torch

from dstrat.errors import MisuseError, RequestError
from dstrat.interfaces.batch import move_to_device
from dstrat.training.callbacks.callback import Callback
from dstrat.training.dispatch import overrides

if TYPE_CHECKING:
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

WriteInterval = Literal["batch", "epoch", "batch_and_epoch"]

_METHODS = {
    "batch": ("write_on_batch_end",),
    "epoch": ("write_on_epoch_end",),
    "batch_and_epoch": ("write_on_batch_end", "write_on_epoch_end"),
}


class PredictionWriter(Callback):
    """What writes predictions; a subclass says how, after each batch, at the end, or both.

    Each process writes what it predicted, and is told which samples of the dataset that is::

        class Writer(PredictionWriter):
            def __init__(self, folder):
                super().__init__(write_interval="epoch")
                self.folder = folder

            def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
                torch.save((predictions, batch_indices), self.folder / f"rank{trainer.global_rank}.pt")

    With ``trainer.predict(..., return_predictions=False)`` nothing else keeps them.

    Args:
        write_interval: ``"batch"``, ``"epoch"`` or ``"batch_and_epoch"``.

    Raises:
        RequestError: The interval is none of these.
        MisuseError: The subclass lacks a method that the interval needs.
    """

    reads_batch_indices = True

    def __init__(self, write_interval: WriteInterval = "batch") -> None:
        if write_interval not in _METHODS:
            known = ", ".join(map(repr, get_args(WriteInterval)))
            raise RequestError(f"write_interval={write_interval!r} must be one of {known}")
        for method in _METHODS[write_interval]:
            if not overrides(self, method, PredictionWriter):
                raise MisuseError(
                    f"{type(self).__name__} has no {method}, which write_interval={write_interval!r} needs: define it"
                )
        self.write_interval = write_interval
        self._predictions: list[list[Any]] = []
        self._indices: list[list[list[Any] | None]] = []

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        prediction: Any,
        batch_indices: list[Any] | None,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        """Write what was predicted for a batch.

        Args:
            trainer: The Trainer that runs.
            module: The module that predicted.
            prediction: What ``predict_step`` returned.
            batch_indices: Indices in the dataset of the batch's samples; None where the loader has none, as with an
                iterable dataset.
            batch: The batch.
            batch_idx: Index of the batch among those of this process.
            dataloader_idx: Index of the loader.
        """

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        predictions: list[Any],
        batch_indices: list[Any],
    ) -> None:
        """Write everything that this process predicted.

        Args:
            trainer: The Trainer that runs.
            module: The module that predicted.
            predictions: For each batch what ``predict_step`` returned, on the CPU; with several loaders a list of
                such lists.
            batch_indices: For each batch the indices in the dataset of its samples, or None; likewise.
        """

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:  # noqa: ARG002 - a hook
        self._predictions = [[] for _ in trainer.predict_dataloaders]
        self._indices = [[] for _ in trainer.predict_dataloaders]

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        indices = trainer.predict_batch_indices
        if self.write_interval != "epoch":
            self.write_on_batch_end(trainer, module, outputs, indices, batch, batch_idx, dataloader_idx)
        if self.write_interval != "batch":
            self._predictions[dataloader_idx].append(move_to_device(outputs, torch.device("cpu")))
            self._indices[dataloader_idx].append(indices)

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        predictions, indices = self._predictions, self._indices
        self._predictions, self._indices = [], []
        if self.write_interval == "batch":
            return
        if len(predictions) == 1:
            self.write_on_epoch_end(trainer, module, predictions[0], indices[0])
        else:
            self.write_on_epoch_end(trainer, module, predictions, indices)
