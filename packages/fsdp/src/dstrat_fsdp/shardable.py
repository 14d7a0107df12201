"""Restrictions of torch's ``fully_shard``, as clear errors."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dstrat.errors import MisuseError
from dstrat.parallel.optimizer_probe import how_division_fails
from dstrat_fsdp.gradients import fsdp_params

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Module
    from torch.optim import Optimizer


def check_shapes(module: Module) -> None:
    """Check that each parameter can be divided.

    Raises:
        MisuseError: One is a scalar.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 and not isinstance(parameter, DTensor):
            raise MisuseError(f"parameter {name!r} is a scalar, which cannot be sharded: give it the shape (1,)")


def check_gradients(module: Module, whose: str) -> None:
    """Check that no layer has sparse gradients.

    Args:
        module: Is going to be trained.
        whose: Name of the strategy.

    Raises:
        MisuseError: An embedding has.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.sparse and layer.weight.requires_grad:
            raise MisuseError(
                f"the embedding {name!r} has sparse=True, and {whose} has no sparse gradients: leave "
                "sparse=True out, or choose a strategy that does not shard parameters"
            )


def check_dtypes(units: Sequence[FSDPModule], module: Module) -> None:
    """Check that the parameters that are trained and gathered together are of one dtype.

    Args:
        units: What is gathered together.
        module: Sharded; it has the names.

    Raises:
        MisuseError: Those of a unit are not.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for unit in units:
        first = None
        for kept in fsdp_params([unit]):
            shard = kept.sharded_param
            if not shard.requires_grad:
                continue
            first = shard if first is None else first
            if shard.dtype != first.dtype:
                raise MisuseError(
                    f"parameters {names[id(first)]!r} of {first.dtype} and {names[id(shard)]!r} of {shard.dtype} are "
                    "gathered together, which takes one dtype: convert one of them, or shard the layer by itself "
                    "(auto_wrap_policy, or fully_shard in configure_model)"
                )


def check_steps_shards(optimizers: Sequence[Optimizer], whose: str) -> None:
    """Check that optimizers give the same results where they step parameters that are sharded; collective.

    Args:
        optimizers: Of a module that has been sharded.
        whose: Name of the strategy.

    Raises:
        MisuseError: One needs whole parameters, or uses operations that torch does not have for shards.
    """
    for optimizer in optimizers:
        sharded = next((p for group in optimizer.param_groups for p in group["params"] if isinstance(p, DTensor)), None)
        if sharded is None:
            continue
        if isinstance(optimizer, torch.optim.LBFGS):
            reason: str | None = "it joins all of them in one vector"
        else:
            reason = how_division_fails(optimizer, sharded.device, partial(_sharded_as, sharded))
        if reason is not None:
            raise MisuseError(
                f"{type(optimizer).__name__} cannot step parameters as {whose} shards them ({reason}): take another "
                "optimizer, such as torch.optim.AdamW, or a strategy that does not shard parameters"
            )


def _sharded_as(sharded: DTensor, whole: Tensor) -> list[Tensor]:
    """Return a matrix, which all ranks have, in shards by rows over the same dimensions of the mesh; collective."""
    placements = [placement if placement.is_replicate() else Shard(0) for placement in sharded.placements]
    return [distribute_tensor(whole.clone(), sharded.device_mesh, placements)]


@contextmanager
def shards_explained() -> Iterator[None]:
    """Say what torch's error means where a module computes with parameters that are sharded at that moment.

    Raises:
        MisuseError: It did so in the ``with`` block.
    """
    try:
        yield
    except RuntimeError as error:
        if "mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise MisuseError(
            "a step computes with the parameters of a block outside of the block's forward, where they are sharded (a "
            "norm of self.parameters() in the loss, another method of the block than forward): compute that in a "
            f"forward, or choose other blocks with auto_wrap_policy. Torch says: {error}"
        ) from error
