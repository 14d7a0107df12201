"""Checkpoints of PyTorch Lightning: reading for a run, and conversion."""

from __future__ import annotations

import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from dstrat.checkpoint.portable.decode import split_name
from dstrat.checkpoint.torch_file import StandInCheckpointIO, without_stand_ins
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.interfaces.state_dict import listed, number_parameters
from dstrat.plugins.known import pip_command
from dstrat.training.checkpoint.restore import training_entries
from dstrat.training.checkpoint.save import CHECKPOINT_VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.checkpoint.paths import CheckpointPath

DSTRAT_KEY = "dstrat"
"""The key of dstrat's own entries in a file that Lightning can load too."""

_VERSION_KEY = "pytorch-lightning_version"


def is_lightning_file(path: str | Path) -> bool:
    """Return whether a path is a file of Lightning, without reading its tensors."""
    file = Path(path)
    if not (file.is_file() and zipfile.is_zipfile(file)):
        return False
    with zipfile.ZipFile(file) as archive:
        # Searched for as bytes: unpickling could run code.
        pickles = [name for name in archive.namelist() if name.endswith("/data.pkl")]
        return any(_VERSION_KEY.encode() in archive.read(name) for name in pickles)


class LightningFileIO(CheckpointIO):
    """Read-only checkpoint io for a run that resumes from a file of Lightning; dstrat-lightning writes such files.

    Objects of other classes than tensors and Python's own are omitted, as by ``dstrat checkpoint convert``.
    """

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        raise CheckpointError(
            f"{str(path)!r} is not written: files that Lightning loads are written with Trainer(plugins='lightning'), "
            f"which needs dstrat-lightning: {pip_command('dstrat-lightning')}"
        )

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        source = StandInCheckpointIO().load_checkpoint(path)
        if DSTRAT_KEY in source:  # written by dstrat-lightning: the run resumes exactly
            shared = {key: value for key, value in source.items() if key in SHARED_KEYS}
            return {**shared, **source[DSTRAT_KEY]}
        if _VERSION_KEY not in source and "dstrat_checkpoint_version" in source:
            return source  # of an earlier run with plugins="torch"
        checkpoint = convert_checkpoint(source, str(path)).checkpoint
        checkpoint.pop("optimizers", None)
        if source.get("optimizer_states"):
            # By number, which each strategy divides as it needs; some strategies of Lightning write names.
            states = source["optimizer_states"]
            checkpoint["optimizer_states"] = [
                number_parameters(state) if _is_named(state) else state for state in states
            ]
        return checkpoint


def _is_named(state: Mapping[str, Any]) -> bool:
    return any(isinstance(name, str) for group in state.get("param_groups", ()) for name in group["params"])


SHARED_KEYS = (
    *("epoch", "global_step", "state_dict", "optimizer_states", "lr_schedulers", "callbacks"),
    *("hyper_parameters", "datamodule_hyper_parameters"),
)
"""Entries that are the same in files of Lightning and of dstrat."""


# Conversion


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A converted checkpoint.

    Attributes:
        checkpoint: The content by dstrat's keys; a fit can resume from it if the source has optimizers.
        entries: Descriptions of the converted entries.
        dropped: Descriptions of the other entries, each with the reason.
    """

    checkpoint: dict[str, Any]
    entries: list[str]
    dropped: list[str]


_COPIED_KEYS = ("hyper_parameters", "hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_name")
_SCALER_KEY = "MixedPrecision"
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")  # of batch norm; a state dict does not mark buffers


def convert_checkpoint(source: Mapping[str, Any], path: str | CheckpointPath) -> Conversion:
    """Convert the content of a Lightning checkpoint.

    Args:
        source: The content, which may have stand-ins for objects of other classes.
        path: Of the file, for messages.

    Raises:
        CheckpointError: It is not a checkpoint of Lightning, or has stand-ins in entries that a training needs.
    """
    if _VERSION_KEY not in source or "state_dict" not in source:
        raise CheckpointError(f"{str(path)!r} is no checkpoint of PyTorch Lightning: it has no {_VERSION_KEY!r}")
    original, (source, unknown) = source, without_stand_ins(dict(source))
    _check_readable(unknown, path)
    weights = dict(source["state_dict"])
    checkpoint: dict[str, Any] = {
        "dstrat_checkpoint_version": CHECKPOINT_VERSION,
        "converted_from": f"PyTorch Lightning {source[_VERSION_KEY]}",
        "epoch": source.get("epoch", 0),
        "global_step": source.get("global_step", 0),
        "state_dict": weights,
    }
    entries = [f"{len(weights)} weights", f"epoch {checkpoint['epoch']}, step {checkpoint['global_step']}"]
    # Absent with save_weights_only.
    if source.get("optimizer_states"):
        checkpoint |= _training(source, weights)
        entries += _describe_optimization(checkpoint)
    for key in _COPIED_KEYS:
        if key in source:
            checkpoint[key] = source[key]
    handled = {"epoch", "global_step", "state_dict", _VERSION_KEY, *_COPIED_KEYS}
    if "loops" in checkpoint:
        handled |= {"loops", "optimizer_states", "lr_schedulers", _SCALER_KEY}
    dropped = [f"{key!r} (Lightning's own)" for key in original if key not in handled and original[key]]
    dropped += [f"{name!r} (of {kind})" for name, kind in unknown.items() if split_name(name)[0] in _COPIED_KEYS]
    return Conversion(checkpoint=checkpoint, entries=entries, dropped=dropped)


def _check_readable(unknown: Mapping[str, str], path: str | CheckpointPath) -> None:
    needed = ("state_dict", "optimizer_states", "lr_schedulers", "loops", _SCALER_KEY)
    problems = [f"{name!r} is of {kind}" for name, kind in unknown.items() if split_name(name)[0] in needed]
    if problems:
        raise CheckpointError(
            f"checkpoint {str(path)!r} is not converted: {listed(problems)}, which cannot be read without running "
            "code; write it again with tensors and plain values there"
        )


def _training(source: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries with which a fit resumes."""
    states = source["optimizer_states"]
    named = [_by_name(state, weights) for state in states]
    return {
        **_position(source),
        # By number, as in the source, if it is not certain which name has which number.
        **({"optimizer_states": list(states)} if None in named else {"optimizers": named}),
        "lr_schedulers": source.get("lr_schedulers", []),
        "precision": source.get(_SCALER_KEY, {}),
    }


def _position(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counters of the fit at the beginning of an epoch, as Lightning does not save the position in data."""
    loop = source.get("loops", {}).get("fit_loop", {})
    batches = loop.get("epoch_loop.batch_progress", {})
    step = source.get("global_step", 0)
    return training_entries(
        epochs_done=_epochs_done(source, loop, batches),
        global_step=step,
        batches_seen=batches.get("total", {}).get("processed", step),
    )


def _epochs_done(source: Mapping[str, Any], loop: Mapping[str, Any], batches: Mapping[str, Any]) -> int:
    """Return the number of complete epochs."""
    epochs: Mapping[str, int] | None = loop.get("epoch_progress", {}).get("current")
    if epochs is None:
        return int(source.get("epoch", 0))  # before Lightning 1.6, whose value is the index of the next epoch
    # A checkpoint of the last validation in an epoch is saved before Lightning counts the epoch.
    is_at_end = epochs["started"] > epochs["processed"] and batches.get("is_last_batch", False)
    return epochs["processed"] + is_at_end


def _describe_optimization(checkpoint: Mapping[str, Any]) -> list[str]:
    is_named = "optimizers" in checkpoint
    optimizers, schedulers = checkpoint["optimizers" if is_named else "optimizer_states"], checkpoint["lr_schedulers"]
    order = "" if is_named else " (which must be made of the same parameters in the same order again)"
    return [_counted(optimizers, "optimizer") + order, _counted(schedulers, "scheduler")]


def _counted(items: list[Any], name: str) -> str:
    return f"{len(items)} {name}{'s' * (len(items) != 1)}"


def _by_name(state: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an optimizer's state by name instead of by number; None if the shapes do not fit."""
    # Usually the parameters are numbered in the order of the state dict, in which buffers come between them.
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    names = [name for name in weights if not name.endswith(_BUFFERS)]
    if numbers != list(range(len(names))):
        return None
    for number, entry in state["state"].items():
        shapes = {tuple(value.shape) for value in entry.values() if isinstance(value, Tensor) and value.dim()}
        if shapes - {tuple(weights[names[number]].shape)}:
            return None
    return {
        "state": {names[number]: entry for number, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [names[number] for number in group["params"]]} for group in state["param_groups"]
        ],
    }
