"""``dstrat checkpoint convert``: a checkpoint of another program as a portable one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click
from torch import Tensor

from dstrat.checkpoint.portable.decode import split
from dstrat.checkpoint.torch_file import without_stand_ins
from dstrat.cli.checkpoint.group import CHECKPOINT_PATH
from dstrat.cli.output import json_option, print_json
from dstrat.errors import CheckpointError
from dstrat.interfaces.state_dict import listed
from dstrat.training.checkpoint.restore import training_entries

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.checkpoint.paths import Place


@click.command()
@click.argument("path", type=CHECKPOINT_PATH)
@click.argument("output", type=CHECKPOINT_PATH)
@json_option
def convert(path: Place, output: Place, as_json: bool) -> None:
    """Convert a .ckpt file of PyTorch Lightning, or what an installed plugin can read.

    Weights, the states of optimizers by the names of their parameters, schedulers, counters and hyperparameters are
    taken over.  Files are read without running code from them: hyperparameters of other classes than Python's own are
    left out.
    """
    from rich.console import Console

    from dstrat.checkpoint.foreign import reader_of
    from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
    from dstrat.checkpoint.torch_file import StandInCheckpointIO
    from dstrat.cli.components import loaded_catalog

    with Console(stderr=True).status("reading ..."):  # shown in terminals only
        reader = reader_of(str(path), loaded_catalog())
        if reader is None:
            conversion = converted(StandInCheckpointIO().load_checkpoint(str(path)), path)
        else:
            conversion = as_conversion(reader[1].load_checkpoint(str(path)))
    with Console(stderr=True).status("writing ..."):
        PortableCheckpointIO().save_checkpoint(conversion.checkpoint, str(output))
    if as_json:
        print_json({"output": str(output), "taken": conversion.entries, "left_out": conversion.dropped})
        return
    click.echo(f"{output}: {', '.join(conversion.entries)}")
    for reason in conversion.dropped:
        click.echo(f"left out: {reason}")


# Converted checkpoint and its report


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A converted checkpoint.

    Attributes:
        checkpoint: Under our keys; a fit can go on from it where the source has optimizers.
        entries: The converted entries, as texts.
        dropped: The entries that were not converted, each with the reason.
    """

    checkpoint: dict[str, Any]
    entries: list[str]
    dropped: list[str]


def as_conversion(checkpoint: dict[str, Any]) -> Conversion:
    """Return what a checkpoint io has converted, with what people want to know of it."""
    converted_entries = [
        f"{len(checkpoint['state_dict'])} weights",
        f"epoch {checkpoint['epoch']}, step {checkpoint['global_step']}",
    ]
    for key, name in (("optimizers", "optimizer"), ("lr_schedulers", "scheduler")):
        count = len(checkpoint.get(key, ()))
        converted_entries += [f"{count} {name}{'s' * (count > 1)}"] if count else []
    return Conversion(checkpoint=checkpoint, entries=converted_entries, dropped=[])


# Checkpoints of PyTorch Lightning, under dstrat's keys.


_VERSION_KEY = "pytorch-lightning_version"
_CHECKPOINT_VERSION = 2
_COPIED_KEYS = ("hyper_parameters", "hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_name")
_SCALER_KEY = "MixedPrecision"
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def converted(source: Mapping[str, Any], path: Place) -> Conversion:
    """Convert what a Lightning checkpoint holds.

    Args:
        source: Its content, which may have stand-ins for objects of other classes.
        path: Its place, for messages.

    Raises:
        CheckpointError: It is none, or has stand-ins in what a training needs.
    """
    if _VERSION_KEY not in source or "state_dict" not in source:
        raise CheckpointError(f"{str(path)!r} is no checkpoint of PyTorch Lightning: it has no {_VERSION_KEY!r}")
    original, (source, unknown) = source, without_stand_ins(dict(source))
    _check_readable(unknown, path)
    weights = dict(source["state_dict"])
    checkpoint: dict[str, Any] = {
        "dstrat_checkpoint_version": _CHECKPOINT_VERSION,
        "converted_from": f"PyTorch Lightning {source[_VERSION_KEY]}",
        "epoch": source.get("epoch", 0),
        "global_step": source.get("global_step", 0),
        "state_dict": weights,
    }
    entries = [f"{len(weights)} weights", f"epoch {checkpoint['epoch']}, step {checkpoint['global_step']}"]
    if source.get("optimizer_states"):
        checkpoint |= _training(source, weights)
        entries += _numbers_of(checkpoint)
    for key in _COPIED_KEYS:
        if key in source:
            checkpoint[key] = source[key]
    handled = {"epoch", "global_step", "state_dict", _VERSION_KEY, *_COPIED_KEYS}
    if "loops" in checkpoint:
        handled |= {"loops", "optimizer_states", "lr_schedulers", _SCALER_KEY}
    dropped = [f"{key!r} (Lightning's own)" for key in original if key not in handled and original[key]]
    dropped += [f"{name!r} (of {kind})" for name, kind in unknown.items() if split(name)[0] in _COPIED_KEYS]
    return Conversion(checkpoint=checkpoint, entries=entries, dropped=dropped)


def _check_readable(unknown: Mapping[str, str], path: Place) -> None:
    needed = ("state_dict", "optimizer_states", "lr_schedulers", "loops", _SCALER_KEY)
    problems = [f"{name!r} is of {kind}" for name, kind in unknown.items() if split(name)[0] in needed]
    if problems:
        raise CheckpointError(
            f"checkpoint {str(path)!r} is not converted: {listed(problems)}, which cannot be read without running "
            "code; write it again with tensors and plain values there"
        )


def _training(source: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a fit needs to go on."""
    return {
        **_position(source),
        **_optimizers(source["optimizer_states"], weights),
        "lr_schedulers": source.get("lr_schedulers", []),
        "precision": source.get(_SCALER_KEY, {}),
    }


def _optimizers(states: list[Mapping[str, Any]], weights: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states by names, or by numbers where it is not certain which name has which number."""
    named = [_by_name(state, weights) for state in states]
    return {"optimizer_states": list(states)} if None in named else {"optimizers": named}


def _position(source: Mapping[str, Any]) -> dict[str, Any]:
    """Return where the fit is: at the beginning of an epoch, as Lightning does not say which data it has read."""
    loop = source.get("loops", {}).get("fit_loop", {})
    batches = loop.get("epoch_loop.batch_progress", {})
    step = source.get("global_step", 0)
    return training_entries(
        epochs_done=_epochs_done(source, loop, batches),
        global_step=step,
        batches_seen=batches.get("total", {}).get("processed", step),
    )


def _epochs_done(source: Mapping[str, Any], loop: Mapping[str, Any], batches: Mapping[str, Any]) -> int:
    """Return how many epochs are done; one that was left in the middle is not."""
    epochs: Mapping[str, int] | None = loop.get("epoch_progress", {}).get("current")
    if epochs is None:
        return int(source.get("epoch", 0))  # before 1.6 it was the number of the next
    is_at_its_end = epochs["started"] > epochs["processed"] and batches.get("is_last_batch", False)
    return epochs["processed"] + is_at_its_end


def _numbers_of(checkpoint: Mapping[str, Any]) -> list[str]:
    is_named = "optimizers" in checkpoint
    optimizers, schedulers = checkpoint["optimizers" if is_named else "optimizer_states"], checkpoint["lr_schedulers"]
    order = "" if is_named else " (which must be made of the same parameters in the same order again)"
    return [_counted(optimizers, "optimizer") + order, _counted(schedulers, "scheduler")]


def _counted(items: list[Any], name: str) -> str:
    return f"{len(items)} {name}{'s' * (len(items) != 1)}"


def _by_name(state: Mapping[str, Any], weights: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an optimizer's state by names instead of numbers; None where the shapes leave doubts.

    Lightning numbers the parameters in the order of the module, in which buffers come between them.
    """
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
