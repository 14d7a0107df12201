"""Options of Colossal-AI's plugins, by Lightning's names and by their own."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.plugins.settings import nearest
from dstrat_colossalai.internals import GeminiPlugin, LowLevelZeroPlugin, PlainDDPPlugin, TorchFSDPPlugin

if TYPE_CHECKING:
    from collections.abc import Mapping

PLUGINS = {
    "gemini": GeminiPlugin,
    "low_level_zero": LowLevelZeroPlugin,
    "torch_ddp": PlainDDPPlugin,
    "torch_fsdp": TorchFSDPPlugin,
}
_OF_TRAINER = {
    "max_norm": "gradient_clip_val",
    "precision": "precision",
    "enable_gradient_accumulation": "accumulate_grad_batches",
}
_DTYPES = {"32-true": "fp32", "16-mixed": "fp16", "bf16-mixed": "bf16"}
_PLACEMENTS: dict[str, dict[str, Any]] = {
    "auto": {"placement_policy": "auto"},
    "static": {"placement_policy": "static"},
    # Names of Colossal-AI before 0.3, which its documentation translates so.
    "cuda": {"placement_policy": "static", "shard_param_frac": 1.0, "offload_optim_frac": 0.0},
    "cpu": {"placement_policy": "static", "offload_optim_frac": 1.0, "offload_param_frac": 1.0},
}
_MIB = 2**20


def gemini_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of GeminiPlugin for options of Lightning's ColossalAIStrategy.

    Args:
        options: By Lightning's names; sizes in elements.

    Raises:
        RequestError: An option has no counterpart in Colossal-AI 0.5, or no such value.
    """
    remaining = dict(options)
    for name, only in {"use_chunk": True, "chunk_size": None, "chunk_search_n_grids": 4096}.items():
        if (value := remaining.pop(name)) != only:
            raise RequestError(
                f"{name}={value!r} is of Colossal-AI before 0.3: it searches for the size of chunks by itself now, "
                "within chunk_search_range and min_chunk_size; leave it out"
            )
    placement = remaining.pop("placement_policy")
    if placement not in _PLACEMENTS:
        raise RequestError(f"placement_policy={placement!r} is not one of {', '.join(map(repr, _PLACEMENTS))}")
    arguments = {"search_range_m": max(1, remaining.pop("chunk_search_range") // _MIB), **_PLACEMENTS[placement]}
    if not remaining.pop("enable_distributed_storage"):
        if placement != "static":
            raise RequestError(
                "enable_distributed_storage=False keeps all parameters on each device, which needs "
                f"placement_policy='static', and that is {placement!r}"
            )
        arguments["shard_param_frac"] = 0.0
    if (smallest := remaining.pop("min_chunk_size")) is not None:
        arguments["min_chunk_size_m"] = smallest / _MIB
    return {**arguments, **remaining}


def trainer_options(
    plugin: str, flag: str, clip: float | None, algorithm: str, accumulate: int, stage: int
) -> dict[str, Any]:
    """Return the arguments of a plugin that follow from those of the Trainer.

    Args:
        plugin: Name of the plugin.
        flag: Precision.
        clip: Largest norm of gradients; None does not clip.
        algorithm: How gradients are clipped.
        accumulate: Batches of an optimizer step.
        stage: Of ZeRO, for ``"low_level_zero"``.

    Raises:
        ConflictError: The plugin cannot clip or accumulate so.
    """
    if plugin not in ("gemini", "low_level_zero"):
        return {}
    if clip is not None and algorithm != "norm":
        raise ConflictError(
            f"gradient_clip_algorithm={algorithm!r} cannot be combined with the plugin {plugin!r}, whose gradients are "
            "sharded: clip by 'norm', or use strategy='colossalai_torch_ddp'"
        )
    if plugin == "low_level_zero" and stage == 2 and accumulate > 1:
        raise ConflictError(
            f"accumulate_grad_batches={accumulate!r} cannot be combined with stage=2, which shards the gradients of "
            "each batch: use stage=1"
        )
    accumulates = {"enable_gradient_accumulation": accumulate > 1} if plugin == "gemini" else {}
    return {"precision": _DTYPES[flag], "max_norm": clip or 0.0, **accumulates}  # 0 does not clip


def check_keywords(plugin: str, keywords: Mapping[str, Any], cls: type) -> None:
    """Raise MisuseError for a keyword that the plugin does not have, or that follows from the Trainer's arguments."""
    possible = [*inspect.signature(PLUGINS[plugin]).parameters]
    for name in keywords:
        if name in _OF_TRAINER and plugin in ("gemini", "low_level_zero"):
            raise MisuseError(f"{cls.__name__} sets {name!r} by the Trainer's {_OF_TRAINER[name]}: give it there")
        if name not in possible:
            near = nearest(name, [*possible, *inspect.signature(cls).parameters])
            advice = f"did you mean {' or '.join(map(repr, near))}?" if near else f"possible are {', '.join(possible)}"
            raise MisuseError(
                f"{cls.__name__} got {name!r}, which neither it nor Colossal-AI's {PLUGINS[plugin].__name__} knows; "
                f"{advice}"
            )
