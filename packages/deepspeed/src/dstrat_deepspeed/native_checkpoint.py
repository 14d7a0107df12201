"""Import of checkpoints of DeepSpeed's ``save_checkpoint``."""
# DeepSpeed's own functions that merge the files (zero_to_fp32, ds_to_universal) unpickle them, which runs code from
# files of unknown origin; and they merge the weights only, without the optimizer's state.

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from typing_extensions import override

from dstrat.checkpoint.portable.decode import split_name
from dstrat.checkpoint.torch_file import read_content, stand_ins, without_stand_ins
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.training.checkpoint.restore import training_entries
from dstrat_deepspeed.optimizer_state import MASTER

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


_VERSION = 2
_DEEPSPEED_KEYS = frozenset(
    {
        "module", "buffer_names", "optimizer", "param_shapes", "frozen_param_shapes", "shared_params",
        "frozen_param_fragments", "lr_scheduler", "data_sampler", "random_ltd", "skipped_steps", "global_steps",
        "global_samples", "dp_world_size", "mp_world_size", "checkpoint_parallel_dimensions", "ds_config", "ds_version",
        "universal_checkpoint_info",
    }
)  # fmt: skip
"""DeepSpeed's own keys; others are the ``client_state`` of the program that saved the checkpoint."""

_logger = logging.getLogger(__name__)


class DeepSpeedCheckpointIO(CheckpointIO):
    """Reader of DeepSpeed's checkpoints of any stage and number of ranks, and of universal ones.

    The result has the weights, the optimizer's state by the names of parameters, its groups, the state of a torch
    scheduler and the number of steps; a fit can resume from it if it has optimizer state.  No file can run code:
    objects that are neither tensors, plain values nor DeepSpeed's own are refused.  It does not write:
    ``DeepSpeedStrategy(save_native=True)`` does.
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
    models = [read_plain(path) for path in files.model]
    model = models[0]
    native = _native_state(files, model)
    module = _full_module(models, native)
    steps = model.get("global_steps", 0) - model.get("skipped_steps", 0)
    kind = "a universal checkpoint" if files.is_universal else "a checkpoint"
    converted: dict[str, Any] = {
        "dstrat_checkpoint_version": _VERSION,
        "converted_from": f"DeepSpeed {model.get('ds_version', '')}, {kind} of {model['dp_world_size']} ranks",
        "epoch": model.get("epoch", 0),
        "global_step": steps,
        "state_dict": module,
    }
    optimizer = _of_stage_0(model, module) if native is None else _named_state(native, module)
    if optimizer is not None:
        converted |= training_entries(epochs_done=converted["epoch"], global_step=steps, batches_seen=steps)
        converted |= {"optimizers": [optimizer], "lr_schedulers": _schedulers(model)}
    client_state = {key: value for key, value in model.items() if key not in _DEEPSPEED_KEYS | {"epoch"}}
    return {**converted, **({"client_state": client_state} if client_state else {})}


def _schedulers(model: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the state of the scheduler if it is one of torch; DeepSpeed's own schedulers are not supported."""
    state = model.get("lr_scheduler")
    if state and "last_epoch" not in state:
        _logger.warning("the scheduler's state is left out: it is of DeepSpeed's own, and fits none of torch")
        return []
    return [state] if state else []


def _native_state(files: NativeFiles, model: Mapping[str, Any]) -> NativeState | None:
    if files.is_universal:
        return of_universal(files.folder, model["param_shapes"])
    if not files.optimizer:
        return None
    ranks = [read_plain(path)["optimizer_state_dict"] for path in files.optimizer]
    count = ranks[0]["partition_count"]
    expected = max(count) if isinstance(count, list) else count
    if len(ranks) != expected:
        raise CheckpointError(f"{str(files.folder)!r} has the files of {len(ranks)} of {expected} ranks")
    is_stage_3 = "fp32_flat_groups" in ranks[0]
    return (of_stage_3 if is_stage_3 else of_stages_1_and_2)(model["param_shapes"], ranks)


def _full_module(models: list[dict[str, Any]], native: NativeState | None) -> dict[str, Any]:
    """Return the module's full state."""
    model = models[0]
    module: dict[str, Any] = dict(model["module"])
    frozen = model.get("frozen_param_shapes") or {}
    for name, value in module.items():
        if native is None or not isinstance(value, Tensor) or value.numel():
            continue  # only stage 3 saves empty tensors, in place of its parameters
        if name in native.weights:
            module[name] = native.weights[name].to(value.dtype)
        elif name in frozen:
            fragments = [rank["frozen_param_fragments"][name].view(-1) for rank in models]
            shape = tuple(frozen[name])
            module[name] = torch.cat(fragments)[: math.prod(shape)].view(shape)
    for alias, name in (model.get("shared_params") or {}).items():
        module[alias] = module[name]
    return module


def _named_state(native: NativeState, module: Mapping[str, Any]) -> dict[str, Any]:
    masters = {name: value for name, value in native.weights.items() if value.dtype != module[name].dtype}
    return {
        "state": {name: entry for name, entry in native.state.items() if entry},
        "param_groups": native.param_groups,
        **({MASTER: masters} if masters else {}),
    }


def _of_stage_0(model: Mapping[str, Any], module: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the optimizer's state of stage 0 by name; None if numbers and shapes do not identify the parameters."""
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
        if isinstance(value, Tensor) and value.numel() != 1
    )
    if not fits:
        _logger.warning("the optimizer's state is left out: it is not certain which of it belongs to which parameter")
        return None
    groups = [{**group, "params": [names[n] for n in group["params"]]} for group in state["param_groups"]]
    named = {"state": {names[n]: entry for n, entry in state["state"].items()}, "param_groups": groups}
    if master:
        named[MASTER] = dict(zip(names, (value for group in master for value in group), strict=True))
    return named


# The files of a checkpoint

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_POINTERS = ("latest", "latest_universal")
UNIVERSAL = "zero"
"""The folder of a universal checkpoint with a folder for each parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeFiles:
    """The paths of a checkpoint's files."""

    folder: Path
    model: list[Path]  # the module's state: one file, or one per rank of stage 3
    optimizer: list[Path]  # the optimizer's state, one file per rank; empty for stage 0 and universal checkpoints
    is_universal: bool  # whether there is a folder for each parameter


def find_files(path: Path) -> NativeFiles | None:
    """Return the files of a checkpoint, or of the one that a file ``latest`` names; None if there is none of DeepSpeed.

    Raises:
        CheckpointError: The checkpoint is of a model-parallel job or of files on NVMe, or files are missing.
    """
    folder = _latest(path)
    if not folder.is_dir():
        return None
    names = sorted(child.name for child in folder.iterdir())
    models = [(int(match[1] or 0), int(match[2]), name) for name in names if (match := _MODEL.fullmatch(name))]
    states = [(int(match[1]), int(match[2]), name) for name in names if (match := _OPTIMIZER.fullmatch(name))]
    if not models:
        return None
    if any(parallel for _, parallel, _ in (*models, *states)):
        raise CheckpointError(
            f"{str(folder)!r} is of a model that is split over several ranks beside ZeRO (mp_rank_01 ...), which "
            "cannot be read: gather it with the program that has split it"
        )
    if "offloaded_tensors" in names:
        raise CheckpointError(
            f"{str(folder)!r} has weights and optimizer state as NVMe had them (offloaded_tensors), which DeepSpeed "
            "alone can read: resume from the portable checkpoint beside it, or save without offload_optimizer to 'nvme'"
        )
    numbers = [rank for rank, _, _ in states]
    if sorted(numbers) != list(range(len(numbers))):
        raise CheckpointError(f"{str(folder)!r} has the files of ranks {sorted(numbers)} only: others are missing")
    return NativeFiles(
        folder=folder,
        model=[folder / name for _, _, name in sorted(models)],
        optimizer=[folder / name for _, _, name in sorted(states)],
        is_universal=(folder / UNIVERSAL).is_dir(),
    )


def _latest(path: Path) -> Path:
    for name in _POINTERS:
        pointer = path / name
        if pointer.is_file():
            tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
            if (path / tag).is_dir() and Path(tag).name == tag:
                return path / tag
    return path


# Full parameters and their optimizer state, merged from the files of all ranks

_WEIGHTS = "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeState:
    """Full weights and optimizer state, by the names of parameters."""

    weights: dict[str, Tensor] = field(default_factory=dict)  # in the optimizer's dtype
    state: dict[str, dict[str, Any]] = field(default_factory=dict)  # empty before the first step
    param_groups: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self,
        shapes: Mapping[str, Any],
        flat: Sequence[Tensor],
        states: Sequence[Mapping[str, Any]],
        *,
        num_shards: int = 1,
        paddings: Sequence[int] | None = None,
    ) -> None:
        """Add the parameters of a group.

        Args:
            shapes: Shapes of the parameters by name.
            flat: Each rank's partition of the weights.
            states: Each rank's optimizer state of the partition.
            num_shards: Number of ranks that share each parameter; 1 if consecutive parameters are cut into partitions.
            paddings: Number of elements after each parameter.
        """

        def cut(partitions: Sequence[Tensor]) -> dict[str, Tensor]:
            shards, begin, parameters = torch.cat(list(partitions)).view(num_shards, -1), 0, {}
            for (name, shape), padding in zip(shapes.items(), paddings or [0] * len(shapes), strict=True):
                size = math.prod(shape)
                end = begin - (-size // num_shards)
                parameters[name] = shards[:, begin:end].reshape(-1)[:size].view(tuple(shape))
                begin = end + padding
            return parameters

        self.weights.update(cut(flat))
        for key, value in states[0].items():
            is_element_wise = isinstance(value, Tensor) and value.dim() > 0 and value.shape == flat[0].shape
            full = cut([state[key] for state in states]) if is_element_wise else {}
            for name in shapes:
                self.state.setdefault(name, {})[key] = full[name] if is_element_wise else _copied(value)


def of_stages_1_and_2(shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> NativeState:
    """Return the state of stage 1 or 2, which cuts the concatenated parameters of a group into equal partitions."""
    base = ranks[0]["base_optimizer_state"]
    if not isinstance(base, dict):
        raise CheckpointError(
            "the checkpoint was saved with elastic_checkpoint, which lacks the options of the optimizer: save it "
            "without, or convert it by DeepSpeed's ds_to_universal first"
        )
    paddings = ranks[0].get("param_alignment_paddings") or [[]] * len(shapes)
    native = NativeState()
    for index, (group, names) in enumerate(zip(base["param_groups"], shapes, strict=True)):
        flat = [rank["single_partition_of_fp32_groups"][index] for rank in ranks]
        states = [rank["base_optimizer_state"]["state"].get(group["params"][0], {}) for rank in ranks]
        native.add(names, flat, states, paddings=paddings[index])
        native.param_groups.append({**group, "params": list(names)})
    return native


def of_stage_3(shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> NativeState:
    """Return the state of stage 3, which cuts each parameter of a sub-group into equal shards."""
    native = NativeState()
    for number, names in enumerate(shapes):
        flat = [rank["fp32_flat_groups"][number] for rank in ranks]
        states = [rank["optimizer_state_dict"]["state"].get(number, {}) for rank in ranks]
        native.add(names, flat, states, num_shards=len(ranks))
    for group in ranks[0]["optimizer_state_dict"]["param_groups"]:
        members = [name for number in group["params"] for name in shapes[number]]
        native.param_groups.append({**group, "params": members})
    return native


def of_universal(folder: Path, shapes: Sequence[Mapping[str, Any]]) -> NativeState:
    """Return the state of a universal checkpoint, which has a folder for each parameter."""
    common = read_plain(folder / UNIVERSAL / "optimizer_state.pt")
    groups = common.get("param_groups") or common["optimizer_state_dict"]["param_groups"]
    steps = common.get("optimizer_state_dict", {}).get("state", {})
    native = NativeState()
    for number, names in enumerate(shapes):
        for name, shape in names.items():
            entry = _of_folder(folder / UNIVERSAL / name, tuple(shape))
            native.weights[name] = entry.pop(_WEIGHTS)
            if entry and "step" not in entry and "step" in steps.get(number, {}):
                entry["step"] = _copied(steps[number]["step"])
            native.state[name] = entry
    # Groups of stage 3 list the numbers of their sub-groups; those of other stages have the order of the shapes.
    has_numbers = sorted(n for group in groups for n in group["params"]) == list(range(len(shapes)))
    for index, group in enumerate(groups):
        numbers = group["params"] if has_numbers else [index]
        native.param_groups.append({**group, "params": [name for number in numbers for name in shapes[number]]})
    return native


def _of_folder(folder: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    # The name is from the checkpoint: it must not lead to another folder.
    if folder.parent.name != UNIVERSAL or folder.name in (".", ".."):
        raise CheckpointError(f"{str(folder)!r} is no folder of a parameter: the checkpoint names one outside of it")
    if not (folder / f"{_WEIGHTS}.pt").is_file():
        raise CheckpointError(f"{str(folder)!r} lacks {_WEIGHTS}.pt: the universal checkpoint is not complete")
    entry = {}
    for path in sorted(folder.glob("*.pt")):
        value = read_plain(path)
        value = value["param"] if isinstance(value, dict) else value
        if isinstance(value, Tensor) and value.dim():
            value = value.reshape(-1)[: math.prod(shape)].reshape(shape)
        entry[path.stem] = value
    return entry


def _copied(value: Any) -> Any:
    """Return a copy of a number, since optimizers change their step tensors in place."""
    return value.clone() if isinstance(value, Tensor) else value


# Files of torch.save, read without running code from them

_NOT_NEEDED = (
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "deepspeed.runtime.bf16_optimizer.fragment_address",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
)
"""DeepSpeed's own classes; their objects are dropped wherever they are."""
_NEEDED = ("", "module", "optimizer", "optimizer_state_dict", "param", "param_groups", "state")
"""The keys of a file below which nothing else may be dropped."""


def read_plain(path: Path) -> Any:
    """Return the tensors, on the CPU, and the plain values of a file; other objects are dropped.

    Raises:
        CheckpointError: The file cannot be read, or something is needed that would run code.
    """
    with torch.serialization.safe_globals(stand_ins(path)):
        plain, dropped = without_stand_ins(read_content(path, path, mmap=True))
    for name, kind in dropped.items():
        if kind not in _NOT_NEEDED and split_name(name)[0] in _NEEDED:
            raise CheckpointError(
                f"{str(path)!r} is not read: {name!r} in it is of {kind}, which cannot be read without running code; "
                "save it again without that"
            )
    return plain
