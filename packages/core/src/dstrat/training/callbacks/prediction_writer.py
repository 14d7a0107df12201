"""Callbacks that write predictions, each rank its own."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, ClassVar, Literal, get_args

import torch
from typing_extensions import override

from dstrat.checkpoint.paths import home_path
from dstrat.errors import MisuseError, RequestError
from dstrat.interfaces.batch import move_to_device
from dstrat.training.callbacks.callback import Callback
from dstrat.training.hooks import overrides

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


WriteInterval = Literal["batch", "epoch", "batch_and_epoch"]

_METHODS = {
    "batch": ("write_on_batch_end",),
    "epoch": ("write_on_epoch_end",),
    "batch_and_epoch": ("write_on_batch_end", "write_on_epoch_end"),
}


class PredictionWriter(Callback):
    """Base class of callbacks that write predictions after each batch, at the end, or both.

    Each rank writes its own predictions, with the indices of their samples in the dataset::

        class Writer(PredictionWriter):
            def __init__(self, folder):
                super().__init__(write_interval="epoch")
                self.folder = folder

            def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
                torch.save((predictions, batch_indices), self.folder / f"rank{trainer.global_rank}.pt")

    With ``trainer.predict(..., return_predictions=False)`` predictions are not collected in memory.

    Args:
        write_interval: ``"batch"``, ``"epoch"`` or ``"batch_and_epoch"``.

    Raises:
        RequestError: The interval is none of these.
        MisuseError: The subclass lacks a method that the interval needs.
    """

    reads_batch_indices = True
    retired_members: ClassVar[Mapping[str, str]] = {"interval": "it is write_interval"}

    def __init__(self, write_interval: WriteInterval = "batch") -> None:
        if write_interval not in _METHODS:
            choices = ", ".join(map(repr, get_args(WriteInterval)))
            raise RequestError(f"write_interval={write_interval!r} must be one of {choices}")
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
        """Write the predictions of a batch.

        Args:
            trainer: The Trainer.
            module: The module.
            prediction: The result of ``predict_step``.
            batch_indices: Indices of the batch's samples in the dataset; None if they are unknown, as for an iterable
                dataset.
            batch: The batch.
            batch_idx: Index of the batch among those of this rank.
            dataloader_idx: Index of the loader.
        """

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        predictions: list[Any],
        batch_indices: list[Any],
    ) -> None:
        """Write all predictions of this rank.

        Args:
            trainer: The Trainer.
            module: The module.
            predictions: The result of ``predict_step`` for each batch, on the CPU; for several loaders a list of such
                lists.
            batch_indices: For each loader, also a single one, the indices of the samples of each batch, or None.
        """

    @override
    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        self._predictions = [[] for _ in trainer.num_predict_batches]
        self._indices = [[] for _ in trainer.num_predict_batches]

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
        self.write_on_epoch_end(trainer, module, predictions[0] if len(predictions) == 1 else predictions, indices)


# Predictions in files of torch.save


_NAME = re.compile(r"rank(\d+)_loader(\d+)(?:_batch(\d+))?\.pt")


class TorchPredictionWriter(PredictionWriter):
    """Write predictions with ``torch.save``; :func:`read_predictions` reads them in the order of the dataset.

    Args:
        folder: Folder of the files, the same on all ranks.
        write_interval: ``"epoch"`` writes one file for each rank and loader at the end; ``"batch"`` writes one file for
            each batch, and needs memory for one batch only.
    """

    def __init__(self, folder: str | Path, write_interval: Literal["batch", "epoch"] = "epoch") -> None:
        if write_interval not in {"batch", "epoch"}:
            raise RequestError(f"write_interval={write_interval!r} of TorchPredictionWriter must be 'batch' or 'epoch'")
        super().__init__(write_interval)
        self.folder = home_path(folder)

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Make the folder, and check that it has no predictions of another run."""
        if stage != "predict":
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, rank, _, _ in _files(self.folder):
            if rank == trainer.global_rank or rank >= trainer.world_size:  # other ranks may be writing already
                raise RequestError(
                    f"{str(self.folder)!r} holds predictions already ({file.name}): "
                    "remove them, or choose another folder"
                )

    @override
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
        name = f"rank{trainer.global_rank}_loader{dataloader_idx}_batch{batch_idx}.pt"
        self._write(name, [move_to_device(prediction, torch.device("cpu"))], [batch_indices])

    @override
    def write_on_epoch_end(
        self,
        trainer: Trainer,
        module: TrainModule,
        predictions: list[Any],
        batch_indices: list[Any],
    ) -> None:
        of_loaders = predictions if len(batch_indices) != 1 else [predictions]
        for index, (batches, indices) in enumerate(zip(of_loaders, batch_indices, strict=True)):
            self._write(f"rank{trainer.global_rank}_loader{index}.pt", batches, indices)

    def _write(self, name: str, predictions: list[Any], batch_indices: list[Any]) -> None:
        unfinished = self.folder / f"{name}.unfinished"  # a name that read_predictions ignores
        torch.save({"predictions": predictions, "batch_indices": batch_indices}, unfinished)
        os.replace(unfinished, self.folder / name)  # noqa: PTH105 - both are paths already


def read_predictions(folder: str | Path, **load_options: Any) -> list[Any]:
    """Return the predictions of a :class:`TorchPredictionWriter`, in the form of ``trainer.predict``.

    Args:
        folder: Folder of the files.
        **load_options: Arguments of ``torch.load``, such as ``weights_only=False`` for predictions with other values
            than tensors, numbers, str and collections of them.

    Returns:
        The predictions of each batch, in the order of the dataset if the indices of samples are known; for several
        loaders a list of such lists.

    Raises:
        RequestError: The folder has no predictions.
    """
    files = sorted(_files(home_path(folder)), key=lambda batches_by_loader: batches_by_loader[1:])
    if not files:
        raise RequestError(f"{str(folder)!r} holds no predictions of a TorchPredictionWriter")
    batches_by_loader: dict[int, list[tuple[Any, Any]]] = {}
    for file, _, loader, _ in files:
        content = torch.load(file, **{"map_location": "cpu", "weights_only": True, **load_options})
        pairs = zip(content["batch_indices"], content["predictions"], strict=True)
        batches_by_loader.setdefault(loader, []).extend(pairs)
    ordered = [_in_order(batches_by_loader[loader]) for loader in sorted(batches_by_loader)]
    return ordered[0] if len(ordered) == 1 else ordered


def _in_order(batches: list[tuple[Any, Any]]) -> list[Any]:
    """Return the predictions in the order of their samples, without duplicates, if the samples are known."""
    if any(indices is None for indices, _ in batches):
        return [prediction for _, prediction in batches]
    # Batches are repeated for strategies that need the same number of them on all ranks.
    by_samples = {tuple(indices): prediction for indices, prediction in batches}
    return [by_samples[indices] for indices in sorted(by_samples)]


def _files(folder: Path) -> list[tuple[Path, int, int, int]]:
    """Return the files of predictions, each with rank, loader and batch."""
    files = []
    for file in folder.iterdir() if folder.is_dir() else []:
        if match := _NAME.fullmatch(file.name):
            rank, loader, batch = (int(number or 0) for number in match.groups())
            files.append((file, rank, loader, batch))
    return files
