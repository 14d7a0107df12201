"""What a checkpoint of PyTorch Lightning holds, under the keys of ours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.builtin.checkpoint.place import Place

_VERSION_KEY = "pytorch-lightning_version"
_CHECKPOINT_VERSION = 2
_KEPT = ("hyper_parameters", "hparams_name", "datamodule_hyper_parameters", "datamodule_hparams_name")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True, kw_only=True, slots=True)
class Conversion:
    """A converted checkpoint.

    Attributes:
        checkpoint: Under our keys.
        taken: What was taken over, for people.
        left_out: What was not, and why.
    """

    checkpoint: dict[str, Any]
    taken: list[str]
    left_out: list[str]


def converted(source: Mapping[str, Any], path: Place) -> Conversion:
    """Convert what a Lightning checkpoint holds.

    Raises:
        CheckpointError: It is none.
    """
    if _VERSION_KEY not in source or "state_dict" not in source:
        raise CheckpointError(f"{str(path)!r} is no checkpoint of PyTorch Lightning: it has no {_VERSION_KEY!r}")
    weights = dict(source["state_dict"])
    checkpoint: dict[str, Any] = {
        "dstrat_checkpoint_version": _CHECKPOINT_VERSION,
        "converted_from": f"PyTorch Lightning {source[_VERSION_KEY]}",
        "epoch": source.get("epoch", 0),
        "global_step": source.get("global_step", 0),
        "state_dict": weights,
    }
    taken = [f"{len(weights)} weights", f"epoch {checkpoint['epoch']}, step {checkpoint['global_step']}"]
    left_out: list[str] = []
    _take_optimizers(source, weights, checkpoint, taken, left_out)
    for key in _KEPT:
        if key in source:
            checkpoint[key] = source[key]
    known = {*checkpoint, *_KEPT, _VERSION_KEY, "optimizer_states"}
    left_out += [f"{key!r} (Lightning's own)" for key in source if key not in known and source[key]]
    return Conversion(checkpoint=checkpoint, taken=taken, left_out=left_out)


def _take_optimizers(
    source: Mapping[str, Any],
    weights: Mapping[str, Any],
    checkpoint: dict[str, Any],
    taken: list[str],
    left_out: list[str],
) -> None:
    states = source.get("optimizer_states", [])
    named = [_by_name(state, weights) for state in states]
    if states and all(state is not None for state in named):
        checkpoint["optimizers"] = named
        taken.append(f"{len(named)} optimizer{'s' * (len(named) > 1)}")
        if "lr_schedulers" in source:
            checkpoint["lr_schedulers"] = source["lr_schedulers"]
            taken.append(f"{len(source['lr_schedulers'])} schedulers")
    elif states:
        left_out.append("optimizers (it is not certain which state belongs to which parameter), and schedulers")


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
