"""Checkpoints that Lightning and dstrat both load."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeVar

from dstrat.checkpoint.torch_file import TorchCheckpointIO
from dstrat.interfaces.state_dict import number_parameters
from dstrat.training.checkpoint.lightning import DSTRAT_KEY, SHARED_KEYS, LightningFileIO
from dstrat.training.module.hyperparameters import MODULE_KEYS
from dstrat.training.module.loading import construct, load_weights, read_checkpoint

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

T = TypeVar("T")


class LightningCheckpointIO(LightningFileIO):
    """One ``.ckpt`` file for each checkpoint, with whole tensors, as Lightning's Trainer writes and loads it.

    ``Trainer(plugins="lightning")`` writes it.  Weights, optimizers, schedulers, counters, hyperparameters and the
    states of callbacks are where Lightning has them; what else a run of dstrat needs to go on exactly is in one more
    entry, which Lightning leaves alone.
    """

    @property
    def file_io(self) -> TorchCheckpointIO:
        """The checkpoint io of single files."""
        return TorchCheckpointIO()

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        self.file_io.save_checkpoint(to_lightning(checkpoint), path)

    def remove_checkpoint(self, path: str | Path) -> None:
        self.file_io.remove_checkpoint(path)


def convert_to_lightning(path: str | Path, output: str | Path) -> None:
    """Write a checkpoint of dstrat, a folder or a file, as a file that Lightning loads, its optimizers included.

    Args:
        path: Of the checkpoint.
        output: The ``.ckpt`` file.

    Raises:
        CheckpointError: The checkpoint cannot be read, or the file not be written.
    """
    checkpoint = dict(read_checkpoint(path))
    if DSTRAT_KEY in checkpoint:  # a file that Lightning loads already
        checkpoint = LightningFileIO().load_checkpoint(path)
    if "optimizers" in checkpoint:
        checkpoint["optimizer_states"] = [number_parameters(state) for state in checkpoint.pop("optimizers")]
    LightningCheckpointIO().save_checkpoint(checkpoint, output)


def load_from_checkpoint(cls: type[T], path: str | Path, *, strict: bool = True, **overrides: Any) -> T:
    """Make a LightningModule with the hyperparameters and weights of a checkpoint of dstrat, a folder or a file.

    ``Net.load_from_checkpoint`` of Lightning reads files only.

    Args:
        cls: The user's class.
        path: Of the checkpoint.
        strict: Whether it is an error that weights are missing or unexpected.
        **overrides: Arguments of the class, which come before the checkpoint's.

    Raises:
        CheckpointError: The checkpoint cannot be read, or its weights do not fit.
        MisuseError: An argument of the class is in neither.
    """
    checkpoint = read_checkpoint(path)
    module: Any = construct(cls, checkpoint, MODULE_KEYS, overrides, path)
    module.on_load_checkpoint(checkpoint)  # before the weights, as it may change the module or the state
    load_weights(module, checkpoint["state_dict"], path, strict=strict)
    return module  # type: ignore[no-any-return]  # of the class


def to_lightning(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Return what Lightning has in a file, with ours in an entry of its own."""
    shared = {key: checkpoint[key] for key in SHARED_KEYS if key in checkpoint}
    # Lightning migrates files of older versions, and this one is as 2.5 and 2.6 write it.
    loaded = next(filter(None, map(sys.modules.get, ("lightning", "pytorch_lightning"))), None)
    version = str(getattr(loaded, "__version__", "2.6.0"))
    converted: dict[str, Any] = {**shared, "pytorch-lightning_version": version}
    for kind in ("", "datamodule_"):
        if f"{kind}hyper_parameters" in shared:
            # Lightning's name for hyperparameters that are each an argument.
            converted[f"{kind}hparams_name"] = checkpoint.get(f"{kind}hparams_name") or "kwargs"
    if "loops" in checkpoint:
        converted["loops"] = {"fit_loop": _fit_loop(checkpoint["loops"])}
    if checkpoint.get("precision"):
        converted["MixedPrecision"] = checkpoint["precision"]
    converted[DSTRAT_KEY] = {key: value for key, value in checkpoint.items() if key not in SHARED_KEYS}
    return converted


def _fit_loop(loops: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of Lightning's loop, as ModelCheckpoint sees them at the end of an epoch or within one."""
    is_at_end = loops["batches_done"] == 0 and loops["epochs_done"] > 0
    epochs = loops["epochs_done"]
    # At the end of an epoch ModelCheckpoint runs before Lightning's loop counts the epoch as completed.
    started = epochs if is_at_end else epochs + 1
    progress = {"ready": started, "started": started, "processed": epochs, "completed": epochs - is_at_end}
    batches = loops.get("loader_length") or loops["batches_seen"] if is_at_end else loops["batches_done"]
    steps = _counted(loops["global_step"], ("ready", "completed"))
    return {
        "state_dict": {},
        "epoch_progress": {"total": progress, "current": progress},
        "epoch_loop.state_dict": {"_batches_that_stepped": loops["global_step"]},
        "epoch_loop.batch_progress": {
            "total": _counts(loops["batches_seen"]),
            "current": _counts(batches),
            "is_last_batch": is_at_end,
        },
        "epoch_loop.automatic_optimization.state_dict": {},
        "epoch_loop.automatic_optimization.optim_progress": {
            "optimizer": {
                "step": steps,
                "zero_grad": _counted(loops["global_step"], ("ready", "started", "completed")),
            }
        },
        "epoch_loop.manual_optimization.state_dict": {},
        "epoch_loop.manual_optimization.optim_step_progress": steps,
    }


def _counts(count: int) -> dict[str, int]:
    return dict.fromkeys(("ready", "started", "processed", "completed"), count)


def _counted(count: int, names: tuple[str, ...]) -> dict[str, dict[str, int]]:
    counts = dict.fromkeys(names, count)
    return {"total": counts, "current": counts}
