"""The optimizer that a configuration names, which DeepSpeed makes and perhaps compiles."""

from __future__ import annotations

import difflib
import importlib.util
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import ConflictError, RequestError
from dstrat_deepspeed.feasibility import offloads_optimizer
from dstrat_deepspeed.prerequisites import check_prerequisites

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.optim import Optimizer

_OWN = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
_ON_THE_CPU = {
    "adam": "cpu_adam",
    "adamw": "cpu_adam",
    "muon": "cpu_adam",
    "adagrad": "cpu_adagrad",
    "lion": "cpu_lion",
    "lamb": "fused_lamb",
}
_ON_THE_DEVICE = {"adam": "fused_adam", "adamw": "fused_adam", "lion": "fused_lion", "lamb": "fused_lamb"}
_NOT_FOR_CPUS = ("fused_lion", "fused_lamb")


def check_named_optimizer(config: dict[str, Any], device_type: str, environ: Mapping[str, str], place: str) -> None:
    """Check that DeepSpeed can make the optimizer that a configuration names, if it does.

    Args:
        config: As far as it is known before a run.
        device_type: ``"cpu"`` or ``"cuda"``.
        environ: Says where programs are, and what they have compiled.
        place: Where the user has written it, for error messages.

    Raises:
        RequestError: There is no such optimizer, it is not for the device, or it cannot be compiled.
    """
    if "optimizer" not in config:
        return
    name, options = _named(config["optimizer"], place)
    if name.startswith("mu") and name != "muon" and importlib.util.find_spec("mup") is None:
        raise RequestError(f"{place} names the optimizer {name!r}, which is of the package mup: pip install mup")
    operations = _ON_THE_CPU if offloads_optimizer(config) else _ON_THE_DEVICE
    operation = None if options.get("torch_adam") else operations.get(name)
    if device_type == "cpu" and operation in _NOT_FOR_CPUS:
        raise RequestError(
            f"{place} names the optimizer {name!r}, which DeepSpeed has for GPUs only: name 'AdamW' or one of "
            "torch.optim, or return one from configure_optimizers"
        )
    if operation is not None:
        option = f"{place}, which names the optimizer {name!r},"
        is_for_gpus = device_type == "cuda" and operation.startswith("fused_")
        check_prerequisites(operation, option, environ, is_for_gpus=is_for_gpus)


def _named(section: Any, place: str) -> tuple[str, dict[str, Any]]:
    """Return the name, in lower case where it is one of DeepSpeed's own, and the options."""
    name = section.get("type") if isinstance(section, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f'{place} says optimizer: {section!r}, and it must be {{"type": "AdamW", "params": {{...}}}}'
        )
    if name.lower() in _OWN:
        options = section.get("params")
        return name.lower(), options if isinstance(options, dict) else {}
    known = [key for key, value in vars(torch.optim).items() if isinstance(value, type) and key != "Optimizer"]
    if name not in known or name == "LBFGS":
        near = difflib.get_close_matches(name, [*known, *_OWN], n=1)
        hint = f"did you mean {near[0]!r}?" if near and name != "LBFGS" else "name another one"
        raise RequestError(f"{place} names the optimizer {name!r}, with which DeepSpeed cannot train: {hint}")
    return name, {}


def check_one_optimizer(config: dict[str, Any], optimizer: Optimizer | None, place: str, *, is_fitting: bool) -> None:
    """Check that there is one place where the optimizer comes from, and that schedulers are the module's.

    Raises:
        ConflictError: There are two.
        RequestError: There is none, and a stage of ZeRO shards it.
    """
    if optimizer is not None and "optimizer" in config:
        raise ConflictError(
            f"{place} has an 'optimizer', and configure_optimizers returned {type(optimizer).__name__}: leave one out"
        )
    if "scheduler" in config:
        raise ConflictError(
            f"{place} has a 'scheduler', which DeepSpeed would step by itself: return the scheduler from "
            "configure_optimizers, so that it is stepped, logged and saved like any other"
        )
    stage = config["zero_optimization"]["stage"]
    if is_fitting and stage > 0 and optimizer is None and "optimizer" not in config:
        raise RequestError(
            f"configure_optimizers returned no optimizer, and stage {stage} of ZeRO shards one: return one, or choose "
            "stage 0"
        )
