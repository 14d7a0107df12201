"""Predictions in files of torch, one or more for each process."""

from __future__ import annotations

import os
import re
from typing import TYPE_CHECKING, Any, Literal

import torch

from dstrat.builtin.checkpoint.place import home_path
from dstrat.errors import RequestError
from dstrat.interfaces.batch import move_to_device
from dstrat.training.callbacks.prediction_writer import PredictionWriter

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_NAME = re.compile(r"rank(\d+)_loader(\d+)(?:_batch(\d+))?\.pt")


class TorchPredictionWriter(PredictionWriter):
    """Writes predictions with ``torch.save``, to be read again, in order, with :func:`read_predictions`.

    Args:
        folder: Where the files go, the same for all processes.
        write_interval: ``"epoch"`` writes a file for each process and loader at the end, ``"batch"`` one for each
            batch, so that no more than one batch is held.
    """

    def __init__(self, folder: str | Path, write_interval: Literal["batch", "epoch"] = "epoch") -> None:
        if write_interval not in {"batch", "epoch"}:
            raise RequestError(f"write_interval={write_interval!r} of TorchPredictionWriter must be 'batch' or 'epoch'")
        super().__init__(write_interval)
        self.folder = home_path(folder)

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:  # noqa: ARG002 - a hook
        """Make the folder; refuse one with predictions that would be mixed with the new ones."""
        if stage != "predict":
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for file, rank, _, _ in _files(self.folder):
            if rank == trainer.global_rank or rank >= trainer.world_size:  # others may have begun to write
                raise RequestError(
                    f"{str(self.folder)!r} holds predictions already ({file.name}): "
                    "remove them, or choose another folder"
                )

    def write_on_batch_end(
        self,
        trainer: Trainer,
        module: TrainModule,  # noqa: ARG002 - a hook
        prediction: Any,
        batch_indices: list[Any] | None,
        batch: Any,  # noqa: ARG002 - a hook
        batch_idx: int,
        dataloader_idx: int,
    ) -> None:
        name = f"rank{trainer.global_rank}_loader{dataloader_idx}_batch{batch_idx}.pt"
        self._write(name, [move_to_device(prediction, torch.device("cpu"))], [batch_indices])

    def write_on_epoch_end(
        self,
        trainer: Trainer,
        module: TrainModule,  # noqa: ARG002 - a hook
        predictions: list[Any],
        batch_indices: list[Any],
    ) -> None:
        several = len(trainer.predict_dataloaders) != 1
        for index, batches in enumerate(predictions if several else [predictions]):
            indices = batch_indices[index] if several else batch_indices
            self._write(f"rank{trainer.global_rank}_loader{index}.pt", batches, indices)

    def _write(self, name: str, predictions: list[Any], batch_indices: list[Any]) -> None:
        unfinished = self.folder / f"{name}.unfinished"
        torch.save({"predictions": predictions, "batch_indices": batch_indices}, unfinished)
        os.replace(unfinished, self.folder / name)  # noqa: PTH105 - both are paths already


def read_predictions(folder: str | Path, **load_options: Any) -> list[Any]:
    """Return the predictions that a :class:`TorchPredictionWriter` wrote, as ``trainer.predict`` would have.

    Args:
        folder: Where they are.
        **load_options: For ``torch.load``, such as ``weights_only=False`` where predictions are not just tensors,
            numbers, text and collections of them.

    Returns:
        What was predicted for each batch, in the order of the dataset where the indices of samples were known; with
        several loaders a list of such lists.

    Raises:
        RequestError: There are no predictions.
    """
    files = sorted(_files(home_path(folder)), key=lambda found: found[1:])
    if not files:
        raise RequestError(f"{str(folder)!r} holds no predictions of a TorchPredictionWriter")
    found: dict[int, list[tuple[Any, Any]]] = {}
    for file, _, loader, _ in files:
        content = torch.load(file, **{"map_location": "cpu", "weights_only": True, **load_options})
        pairs = zip(content["batch_indices"], content["predictions"], strict=True)
        found.setdefault(loader, []).extend(pairs)
    ordered = [_in_order(found[loader]) for loader in sorted(found)]
    return ordered[0] if len(ordered) == 1 else ordered


def _in_order(batches: list[tuple[Any, Any]]) -> list[Any]:
    """Return the predictions by the samples that they are for, each once, where that is known."""
    if any(indices is None for indices, _ in batches):
        return [prediction for _, prediction in batches]
    by_samples = {tuple(indices): prediction for indices, prediction in batches}
    return [by_samples[indices] for indices in sorted(by_samples)]


def _files(folder: Path) -> list[tuple[Path, int, int, int]]:
    """Return the files of predictions with rank, loader and batch."""
    found = []
    for file in folder.iterdir() if folder.is_dir() else []:
        if match := _NAME.fullmatch(file.name):
            rank, loader, batch = (int(number or 0) for number in match.groups())
            found.append((file, rank, loader, batch))
    return found
