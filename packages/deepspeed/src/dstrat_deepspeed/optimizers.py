"""Optimizers for DeepSpeed: the user's, those named in a configuration, and those for the CPU."""

from __future__ import annotations

import difflib
import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.parallel.optimizer_checks import how_flat_pieces_fail
from dstrat.parallel.optimizer_closures import recomputes_loss
from dstrat_deepspeed.runtime import check_prerequisites
from dstrat_deepspeed.validation import offloads_optimizer

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch.optim import Optimizer

_logger = logging.getLogger(__name__)


def only_optimizer(optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """Return the only optimizer of a module; None if it has none.

    Raises:
        RequestError: There are several, or its step calls a closure to compute gradients.
    """
    if not optimizers:
        return None
    if len(optimizers) > 1:
        raise RequestError(
            f"configure_optimizers returned {len(optimizers)} optimizers, and DeepSpeed trains with one: "
            "put the parameters into groups of a single optimizer, or, where modules take turns as in a GAN, choose a "
            'strategy that steps each of them, such as "fsdp" or "ddp"'
        )
    [optimizer] = optimizers
    if recomputes_loss(optimizer):
        raise RequestError(
            f"{type(optimizer).__name__} computes the loss several times in one step, which DeepSpeed's engine cannot "
            "do: choose another optimizer, such as torch.optim.AdamW, or strategy='ddp'"
        )
    return optimizer


def check_elementwise(optimizer: Optimizer | None, stage: int, device: torch.device) -> None:
    """Raise a RequestError if a stage shards an optimizer that has other results for flat pieces of parameters."""
    if optimizer is None or stage == 0 or type(optimizer).__module__.startswith("deepspeed."):
        return
    reason = how_flat_pieces_fail(optimizer, device)
    if reason is not None:
        raise RequestError(
            f"{type(optimizer).__name__} needs whole parameters, and stage {stage} of ZeRO lets each rank step "
            f"flat pieces of some ({reason}): take an optimizer that treats each element by itself, such as "
            "torch.optim.AdamW, or choose stage 0"
        )


def check_unstepped(optimizer: Optimizer) -> None:
    """Raise a MisuseError if an optimizer has state: DeepSpeed replaces its parameters, which loses it."""
    entries = [entry for entry in optimizer.state.values() if not isinstance(entry, dict) or entry]
    if isinstance(optimizer, torch.optim.Adagrad):  # PartitionedState.init_adagrad restores its constructor's state
        entries = [entry for entry in entries if entry["step"] > 0]
    if entries:
        raise MisuseError(
            f"the {type(optimizer).__name__} has state of parameters in whose place DeepSpeed puts other tensors, "
            "because it has stepped before or makes state in its constructor: build it in configure_optimizers, or "
            "choose one that makes its state in its first step"
        )


def check_has_counterpart(optimizer: Optimizer) -> None:
    """Raise a RequestError if DeepSpeed has no optimizer for the CPU that is equivalent to one."""
    kind = type(optimizer)
    if kind.__module__.startswith("deepspeed."):
        return
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise RequestError(
            f"offload_optimizer needs an optimizer for the CPU, not {kind.__name__}: choose torch.optim.AdamW, "
            "torch.optim.Adam or one of deepspeed.ops, or keep it with "
            'config={"zero_force_ds_cpu_optimizer": False}'
        )
    unsupported = [name for name in ("amsgrad", "maximize") if any(group[name] for group in optimizer.param_groups)]
    if unsupported:
        raise RequestError(
            f"{kind.__name__} has {unsupported[0]}=True, which DeepSpeedCPUAdam, its replacement with "
            "offload_optimizer, does not support: leave one of them out"
        )


def optimizer_for_cpu(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with state and step on the CPU: DeepSpeedCPUAdam for torch's Adam and AdamW.

    Raises:
        RequestError: DeepSpeed has no equivalent optimizer.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("deepspeed."):
        return optimizer
    check_has_counterpart(optimizer)
    _logger.info("%s becomes DeepSpeedCPUAdam, as its state is on the CPU (offload_optimizer)", kind.__name__)
    adam: Optimizer = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
        [{"params": group["params"]} for group in optimizer.param_groups], adamw_mode=kind is torch.optim.AdamW
    )
    for index, group in enumerate(optimizer.param_groups):  # the same dicts: schedulers set learning rates in them
        group.update({name: value for name, value in adam.param_groups[index].items() if name not in group})
        adam.param_groups[index] = group
    optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - or its schedulers warn that it never steps
    return adam


# The optimizer of a configuration, which DeepSpeed constructs, and some of which it compiles

_OF_DEEPSPEED = ("adam", "adamw", "adagrad", "lamb", "lion", "muon", "muadam", "muadamw", "musgd")
_ON_THE_CPU = {
    "adam": "cpu_adam",
    "adamw": "cpu_adam",
    "muon": "cpu_adam",
    "adagrad": "cpu_adagrad",
    "lion": "cpu_lion",
    "lamb": "fused_lamb",
}
_ON_THE_DEVICE = {"adam": "fused_adam", "adamw": "fused_adam", "lion": "fused_lion", "lamb": "fused_lamb"}
_FOR_GPUS_ONLY = ("fused_lion", "fused_lamb")


def check_named_optimizer(config: dict[str, Any], device_type: str, environ: Mapping[str, str], source: str) -> None:
    """Raise a RequestError if DeepSpeed cannot construct the optimizer that a configuration names.

    Args:
        config: As far as it is known before a run.
        device_type: ``"cpu"`` or ``"cuda"``.
        environ: The environment, for the paths of programs and of compiled operations.
        source: The name of the configuration in error messages.
    """
    if "optimizer" not in config:
        return
    section = config["optimizer"]
    name = section.get("type") if isinstance(section, dict) else None
    if not isinstance(name, str):
        raise RequestError(
            f'{source} says optimizer: {section!r}, and it must be {{"type": "AdamW", "params": {{...}}}}'
        )
    if name.lower() not in _OF_DEEPSPEED:
        known = [key for key, value in vars(torch.optim).items() if isinstance(value, type) and key != "Optimizer"]
        if name not in known or name == "LBFGS":
            near = difflib.get_close_matches(name, [*known, *_OF_DEEPSPEED], n=1)
            hint = f"did you mean {near[0]!r}?" if near and name != "LBFGS" else "name another one"
            raise RequestError(f"{source} names the optimizer {name!r}, with which DeepSpeed cannot train: {hint}")
        return
    if (section.get("params") or {}).get("torch_adam"):
        return
    operation = (_ON_THE_CPU if offloads_optimizer(config) else _ON_THE_DEVICE).get(name.lower())
    if device_type == "cpu" and operation in _FOR_GPUS_ONLY:
        raise RequestError(
            f"{source} names the optimizer {name!r}, which DeepSpeed has for GPUs only: name 'AdamW' or one of "
            "torch.optim, or return one from configure_optimizers"
        )
    if operation is not None:
        option = f"{source}, which names the optimizer {name!r},"
        is_for_gpus = device_type == "cuda" and operation.startswith("fused_")
        check_prerequisites(operation, option, environ, is_for_gpus=is_for_gpus)


def check_one_optimizer(config: dict[str, Any], optimizer: Optimizer | None, source: str, *, is_fitting: bool) -> None:
    """Raise an error unless one of module and configuration has an optimizer, and schedulers are the module's."""
    if optimizer is not None and "optimizer" in config:
        raise ConflictError(
            f"{source} has an 'optimizer', and configure_optimizers returned {type(optimizer).__name__}: leave one out"
        )
    if "scheduler" in config:
        raise ConflictError(
            f"{source} has a 'scheduler', which DeepSpeed would step by itself: return the scheduler from "
            "configure_optimizers, so that it is stepped, logged and saved like any other"
        )
    stage = config["zero_optimization"]["stage"]
    if is_fitting and stage > 0 and optimizer is None and "optimizer" not in config:
        raise RequestError(
            f"configure_optimizers returned no optimizer, and stage {stage} of ZeRO shards one: return one, or choose "
            "stage 0"
        )
