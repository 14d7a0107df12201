"""Whole parameters and their optimizer state, put together from what the ranks of DeepSpeed have saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat.errors import CheckpointError
from dstrat_deepspeed.native_files import UNIVERSAL
from dstrat_deepspeed.plain_files import read_plain

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

_WEIGHTS = "fp32"


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeState:
    """Parameters as the optimizer has them.

    Attributes:
        weights: By name.
        state: What the optimizer keeps, by name and key; empty before its first step.
        param_groups: The groups with their options and the names of their parameters.
    """

    weights: dict[str, Tensor]
    state: dict[str, dict[str, Any]]
    param_groups: list[dict[str, Any]]


def of_stages_1_and_2(shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> NativeState:
    """Return the parameters of stage 1 or 2: those of a group follow each other over the ranks.

    Args:
        shapes: Of the parameters of each group, by name.
        ranks: The state of the optimizer, as each rank has saved it.
    """
    base = ranks[0]["base_optimizer_state"]
    if not isinstance(base, dict):
        raise CheckpointError(
            "the checkpoint was saved with elastic_checkpoint, which lacks the options of the optimizer: save it "
            "without, or convert it by DeepSpeed's ds_to_universal first"
        )
    paddings = ranks[0].get("param_alignment_paddings") or [[]] * len(shapes)
    found = NativeState(weights={}, state={}, param_groups=[])
    for index, (group, names) in enumerate(zip(base["param_groups"], shapes, strict=True)):
        number = group["params"][0]
        cut = _consecutive(names, paddings[index])
        found.weights.update(cut(torch.cat([rank["single_partition_of_fp32_groups"][index] for rank in ranks])))
        _add_states(found, [rank["base_optimizer_state"]["state"].get(number, {}) for rank in ranks], names, cut)
        found.param_groups.append({**group, "params": list(names)})
    return found


def of_stage_3(shapes: Sequence[Mapping[str, Any]], ranks: Sequence[Mapping[str, Any]]) -> NativeState:
    """Return the parameters of stage 3: each is cut into as many equal parts as there are ranks.

    Args:
        shapes: Of the parameters of each sub-group, by name.
        ranks: The state of the optimizer, as each rank has saved it.
    """
    found = NativeState(weights={}, state={}, param_groups=[])
    for number, names in enumerate(shapes):
        cut = _in_equal_parts(names, len(ranks))
        found.weights.update(cut(torch.cat([rank["fp32_flat_groups"][number] for rank in ranks])))
        states = [rank["optimizer_state_dict"]["state"].get(number, {}) for rank in ranks]
        _add_states(found, states, names, cut)
    for group in ranks[0]["optimizer_state_dict"]["param_groups"]:
        members = [name for number in group["params"] for name in shapes[number]]
        found.param_groups.append({**group, "params": members})
    return found


def of_universal(folder: Path, shapes: Sequence[Mapping[str, Any]]) -> NativeState:
    """Return the parameters of a universal checkpoint: each has a folder.

    Args:
        folder: The checkpoint.
        shapes: Of the parameters, by name.
    """
    common = read_plain(folder / UNIVERSAL / "optimizer_state.pt")
    groups = common.get("param_groups") or common["optimizer_state_dict"]["param_groups"]
    steps = common.get("optimizer_state_dict", {}).get("state", {})
    found = NativeState(weights={}, state={}, param_groups=[])
    for number, names in enumerate(shapes):
        for name, shape in names.items():
            entry = _of_folder(folder / UNIVERSAL / name, tuple(shape))
            found.weights[name] = entry.pop(_WEIGHTS)
            if entry and "step" not in entry and "step" in steps.get(number, {}):
                entry["step"] = _own(steps[number]["step"])
            found.state[name] = entry
    numbers = list(range(len(shapes)))
    for index, group in enumerate(groups):
        own = group["params"] if sorted(n for g in groups for n in g["params"]) == numbers else [index]
        found.param_groups.append({**group, "params": [name for number in own for name in shapes[number]]})
    return found


def _of_folder(folder: Path, shape: tuple[int, ...]) -> dict[str, Any]:
    if folder.parent.name != UNIVERSAL or folder.name in (".", ".."):
        raise CheckpointError(f"{str(folder)!r} is no folder of a parameter: the checkpoint names a place beside it")
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


def _add_states(
    found: NativeState,
    states: Sequence[Mapping[str, Any]],
    names: Mapping[str, Any],
    cut: Callable[[Tensor], dict[str, Tensor]],
) -> None:
    for key, value in states[0].items():
        is_element_wise = isinstance(value, Tensor) and value.dim() > 0
        parts = cut(torch.cat([state[key] for state in states])) if is_element_wise else {}
        for name in names:
            found.state.setdefault(name, {})[key] = parts[name] if is_element_wise else _own(value)


def _own(value: Any) -> Any:
    """Return a number that no other parameter counts on."""
    return value.clone() if isinstance(value, Tensor) else value


def _consecutive(names: Mapping[str, Any], paddings: Sequence[int]) -> Callable[[Tensor], dict[str, Tensor]]:
    def cut(flat: Tensor) -> dict[str, Tensor]:
        parts, begin = {}, 0
        for (name, shape), padding in zip(names.items(), paddings or [0] * len(names), strict=True):
            size = math.prod(shape)
            parts[name] = flat[begin : begin + size].view(tuple(shape))
            begin += size + padding
        return parts

    return cut


def _in_equal_parts(names: Mapping[str, Any], num_ranks: int) -> Callable[[Tensor], dict[str, Tensor]]:
    def cut(flat: Tensor) -> dict[str, Tensor]:
        by_rank, begin, parts = flat.view(num_ranks, -1), 0, {}
        for name, shape in names.items():
            size = math.prod(shape)
            part = -(-size // num_ranks)
            parts[name] = by_rank[:, begin : begin + part].reshape(-1)[:size].view(tuple(shape))
            begin += part
        return parts

    return cut
