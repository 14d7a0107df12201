"""Import of checkpoints of DeepSpeed's ``save_checkpoint``."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.training.converted import training_entries
from dstrat_deepspeed.native_files import NativeFiles, find_files
from dstrat_deepspeed.native_parameters import NativeState, of_stage_3, of_stages_1_and_2, of_universal
from dstrat_deepspeed.state import MASTER

if TYPE_CHECKING:
    from collections.abc import Mapping

_VERSION = 2
_OWN = frozenset(
    {
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "checkpoint_parallel_dimensions",
        "ds_config",
        "ds_version",
        "universal_checkpoint_info",
    }
)
"""The keys that are DeepSpeed's; others are what a program has saved beside them."""

_logger = logging.getLogger(__name__)


class DeepSpeedCheckpointIO(CheckpointIO):
    """Reads checkpoints of DeepSpeed, of any stage and number of ranks, and universal ones.

    Weights, the optimizer's state by the names of parameters, its groups, a scheduler of torch and the number of steps
    are taken over; a fit can go on from it where it has an optimizer.  No file can run code: what is neither a tensor,
    a plain value nor DeepSpeed's own is refused.  It does not write; ``DeepSpeedStrategy(save_native=True)`` does.
    """

    @override
    @classmethod
    def recognizes(cls, path: str | Path) -> bool:
        return find_files(Path(path)) is not None

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        raise CheckpointError(
            f"checkpoint {str(path)!r} is not written: this checkpoint io only reads; DeepSpeed's own files are "
            "written by DeepSpeedStrategy(save_native=True)"
        )

    @override
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        files = find_files(Path(path))
        if files is None:
            raise CheckpointError(f"{str(path)!r} is no checkpoint of DeepSpeed: it has no *_model_states.pt")
        try:
            return _converted(files)
        except (KeyError, IndexError, TypeError, AttributeError, ValueError, RuntimeError) as error:
            raise CheckpointError(
                f"{str(files.folder)!r} is not as DeepSpeed 0.19 writes checkpoints ({type(error).__name__}: {error})"
            ) from error


def _converted(files: NativeFiles) -> dict[str, Any]:
    models = files.read_models()
    model = models[0]
    native = _native_state(files, model)
    module = _whole_module(models, native)
    done = model.get("global_steps", 0) - model.get("skipped_steps", 0)
    converted: dict[str, Any] = {
        "dstrat_checkpoint_version": _VERSION,
        "converted_from": f"DeepSpeed {model.get('ds_version', '')}, {_kind(files)} of {model['dp_world_size']} ranks",
        "epoch": model.get("epoch", 0),
        "global_step": done,
        "state_dict": module,
    }
    optimizer = _of_stage_0(model, module) if native is None else _as_ours(native, module)
    if optimizer is not None:
        converted |= training_entries(epochs_done=converted["epoch"], global_step=done, batches_seen=done)
        converted |= {"optimizers": [optimizer], "lr_schedulers": _schedulers(model)}
    beside = {key: value for key, value in model.items() if key not in _OWN | {"epoch"}}
    return {**converted, **({"client_state": beside} if beside else {})}


def _schedulers(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the state of the scheduler if it is one of torch, as modules have them here."""
    state = model.get("lr_scheduler")
    if state and "last_epoch" not in state:
        _logger.warning("the scheduler's state is left out: it is of DeepSpeed's own, and fits none of torch")
        return []
    return [state] if state else []


def _kind(files: NativeFiles) -> str:
    return "a universal checkpoint" if files.is_universal else "a checkpoint"


def _native_state(files: NativeFiles, model: Mapping[str, Any]) -> NativeState | None:
    if files.is_universal:
        return of_universal(files.folder, model["param_shapes"])
    if not files.optimizer:
        return None
    ranks = files.read_optimizers()
    count = ranks[0]["partition_count"]
    expected = max(count) if isinstance(count, list) else count
    if len(ranks) != expected:
        raise CheckpointError(f"{str(files.folder)!r} has the files of {len(ranks)} of {expected} ranks")
    is_stage_3 = "fp32_flat_groups" in ranks[0]
    return (of_stage_3 if is_stage_3 else of_stages_1_and_2)(model["param_shapes"], ranks)


def _whole_module(models: list[dict[str, Any]], native: NativeState | None) -> dict[str, Any]:
    """Return the module's state; stage 3 has saved empty tensors in the place of its parameters."""
    model = models[0]
    module: dict[str, Any] = dict(model["module"])
    shared = model.get("shared_params") or {}
    frozen = model.get("frozen_param_shapes") or {}
    for name, value in module.items():
        if native is None or not isinstance(value, Tensor) or value.numel():
            continue
        if name in native.weights:
            module[name] = native.weights[name].to(value.dtype)
        elif name in frozen:
            parts = [other["frozen_param_fragments"][name].view(-1) for other in models]
            shape = tuple(frozen[name])
            module[name] = torch.cat(parts)[: torch.Size(shape).numel()].view(shape)
    for alias, name in shared.items():
        module[alias] = module[name]
    return module


def _as_ours(native: NativeState, module: Mapping[str, Any]) -> dict[str, Any]:
    rounded = {name: value for name, value in native.weights.items() if value.dtype != module[name].dtype}
    return {
        "state": {name: entry for name, entry in native.state.items() if entry},
        "param_groups": native.param_groups,
        **({MASTER: rounded} if rounded else {}),
    }


def _of_stage_0(model: Mapping[str, Any], module: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return an optimizer's state that has numbers in the place of names, if the shapes leave no doubt."""
    state = model.get("optimizer")
    if not state:
        return None
    master = state.get("fp32_groups")
    state = state.get("optimizer_state_dict", state)
    buffers, shared = set(model.get("buffer_names") or ()), set(model.get("shared_params") or ())
    names = [name for name in module if name not in buffers | shared]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    fits = numbers == list(range(len(names))) and all(
        value.shape == module[names[number]].shape
        for number, entry in state["state"].items()
        for value in entry.values()
        if isinstance(value, Tensor) and value.dim()
    )
    if not fits:
        _logger.warning("the optimizer's state is left out: it is not certain which of it belongs to which parameter")
        return None
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state["param_groups"]]
    found = {"state": {names[n]: entry for n, entry in state["state"].items()}, "param_groups": groups}
    if master:
        found[MASTER] = dict(zip(names, (value for group in master for value in group), strict=True))
    return found
