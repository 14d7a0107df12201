"""Optimizers that DeepSpeed can train with, and its substitutes on the CPU."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import MisuseError, RequestError
from dstrat.parallel.optimizer_checks import how_division_fails

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.optim import Optimizer

_logger = logging.getLogger(__name__)


def only_optimizer(optimizers: Sequence[Optimizer]) -> Optimizer | None:
    """Return the optimizer of a module; None where there is none.

    Raises:
        RequestError: There are several, or it is one that computes gradients by itself.
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
    if isinstance(optimizer, torch.optim.LBFGS):
        raise RequestError(
            "LBFGS computes the loss several times in one step, which DeepSpeed's engine cannot do: choose another "
            "optimizer, such as torch.optim.AdamW, or another strategy"
        )
    return optimizer


def optimizer_for_cpu(optimizer: Optimizer) -> Optimizer:
    """Return the optimizer whose state and step are on the CPU in the place of torch's.

    Args:
        optimizer: Adam or AdamW of torch become DeepSpeed's; DeepSpeed's own stay as they are.

    Raises:
        RequestError: DeepSpeed has none that does the same.
    """
    kind = type(optimizer)
    if kind.__module__.startswith("deepspeed."):
        return optimizer
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        raise RequestError(
            f"offload_optimizer needs an optimizer for the CPU, and {kind.__name__} is none: choose torch.optim.AdamW, "
            "torch.optim.Adam or one of deepspeed.ops, or keep it with "
            'config={"zero_force_ds_cpu_optimizer": False}'
        )
    unsupported = [name for name in ("amsgrad", "maximize") if any(group[name] for group in optimizer.param_groups)]
    if unsupported:
        raise RequestError(
            f"{kind.__name__} has {unsupported[0]}=True, which DeepSpeedCPUAdam, its place with offload_optimizer, has "
            "not: leave one of them out"
        )
    _logger.info("%s becomes DeepSpeedCPUAdam, as its state is on the CPU (offload_optimizer)", kind.__name__)
    return _cpu_adam(optimizer, adamw_mode=kind is torch.optim.AdamW)


def resume_exactly(optimizer: Optimizer | None) -> None:
    """Let DeepSpeed's Adam for the CPU correct its moments by the number of the step, in each step.

    By itself it multiplies powers of the betas from step to step, and computes them anew where it begins with a later
    step: a run that goes on from a checkpoint would differ in the last digits.

    Args:
        optimizer: Another one stays as it is.
    """
    compiled = getattr(optimizer, "ds_opt_adam", None)
    if compiled is not None and hasattr(compiled, "adam_update") and not isinstance(compiled, _PowersAnew):
        optimizer.ds_opt_adam = _PowersAnew(compiled)  # type: ignore[union-attr]  # None has no such attribute


class _PowersAnew:
    """Compiled functions, of which ``adam_update`` forgets the step before."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled

    def __getattr__(self, name: str) -> Any:
        return getattr(self._compiled, name)

    def adam_update(self, number: int, step: int, *options_and_tensors: Any) -> Any:
        """Update tensors in a step, after none in another that neither is nor precedes it."""
        *options, weights, gradients, first, second = options_and_tensors
        nothing = (tensor[:0] for tensor in (weights, gradients, first, second))
        self._compiled.adam_update(number, step + 1, *options, *nothing)
        return self._compiled.adam_update(number, step, *options_and_tensors)


def _cpu_adam(optimizer: Optimizer, *, adamw_mode: bool) -> Optimizer:
    if optimizer.state:
        raise MisuseError(
            f"the {type(optimizer).__name__} has stepped already, and its state cannot be offloaded: build it in "
            "configure_optimizers"
        )
    adam: Optimizer = import_module("deepspeed.ops.adam").DeepSpeedCPUAdam(
        [{"params": group["params"]} for group in optimizer.param_groups], adamw_mode=adamw_mode
    )
    for index, group in enumerate(optimizer.param_groups):  # the same dicts, in which schedulers set learning rates
        group.update({name: value for name, value in adam.param_groups[index].items() if name not in group})
        adam.param_groups[index] = group
    optimizer._opt_called = True  # type: ignore[attr-defined]  # noqa: SLF001 - or its schedulers warn that it never steps
    return adam


@contextmanager
def without_first_step() -> Iterator[None]:
    """Keep DeepSpeed from stepping stage 0's optimizer in 16 bits with zero gradients when it is wrapped.

    It does so to allocate the state, decays the weights by it, and counts it in Adam's correction of the real steps.
    """
    wrappers = [
        import_module("deepspeed.runtime.fp16.fused_optimizer").FP16_Optimizer,
        import_module("deepspeed.runtime.fp16.unfused_optimizer").FP16_UnfusedOptimizer,
    ]
    before = [wrapper.initialize_optimizer_states for wrapper in wrappers]
    try:
        for wrapper in wrappers:
            wrapper.initialize_optimizer_states = lambda _: None
        yield
    finally:
        for wrapper, method in zip(wrappers, before, strict=True):
            wrapper.initialize_optimizer_states = method


def keep(optimizer: Optimizer, wrapped: Any) -> None:
    """Let what DeepSpeed has wrapped around an optimizer step this one.

    In the place of torch's Adagrad stages 1 to 3 put a new one with the options of the first, without its groups, which
    nobody else knows: schedulers and checkpoints have the first one.
    """
    if wrapped.optimizer is not optimizer:
        wrapped.optimizer = optimizer


def check_division(optimizer: Optimizer | None, stage: int, device: torch.device) -> None:
    """Check that the optimizer gives the same results where it steps pieces of parameters.

    Args:
        optimizer: None, and one of DeepSpeed's own, pass.
        stage: Of ZeRO; from 1 on pieces of parameters, flattened, are in the place of these.
        device: Where it steps.

    Raises:
        RequestError: It needs whole parameters.
    """
    if optimizer is None or stage == 0 or type(optimizer).__module__.startswith("deepspeed."):
        return
    reason = how_division_fails(optimizer, device, lambda whole: [piece.clone() for piece in whole.flatten().split(9)])
    if reason is not None:
        raise RequestError(
            f"{type(optimizer).__name__} needs whole parameters, and stage {stage} of ZeRO lets it step flat pieces of "
            f"them ({reason}): take an optimizer that treats each element by itself, such as torch.optim.AdamW, or "
            "choose stage 0"
        )
