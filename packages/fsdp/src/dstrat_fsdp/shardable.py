"""What torch's ``fully_shard`` cannot do with a module or its use, said in words."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError
from dstrat_fsdp.gradients import fsdp_params

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.fsdp import FSDPModule
    from torch.nn import Module
    from torch.optim import Optimizer

_WHOLE_ONLY = (torch.optim.LBFGS, torch.optim.Rprop, torch.optim.Adafactor)


def check_shapes(module: Module) -> None:
    """Check that each parameter can be divided.

    Raises:
        MisuseError: One is a scalar.
    """
    for name, parameter in module.named_parameters():
        if parameter.dim() == 0 and not isinstance(parameter, DTensor):
            raise MisuseError(f"parameter {name!r} is a scalar, which cannot be sharded: give it the shape (1,)")


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


def check_steps_shards(optimizers: Sequence[Optimizer]) -> None:
    """Check that optimizers can step parameters that are sharded.

    Raises:
        MisuseError: One uses operations that torch does not have for them.
    """
    for optimizer in optimizers:
        if isinstance(optimizer, _WHOLE_ONLY):
            raise MisuseError(
                f"torch's {type(optimizer).__name__} cannot step parameters that are sharded: take another optimizer, "
                "such as AdamW or SGD, or a strategy that does not shard parameters"
            )


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
