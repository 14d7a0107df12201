"""FairScale's classes, the module that they wrap, and a check of its optimizers."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from torch.nn import Module

from dstrat.errors import MisuseError

# FairScale's last release is of 2022: it imports what torch has deprecated since, and users cannot change that.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from fairscale.nn import auto_wrap, default_auto_wrap_policy, enable_wrap
    from fairscale.nn.data_parallel import FullyShardedDataParallel, ShardedDataParallel
    from fairscale.optim import OSS
    from fairscale.optim.grad_scaler import ShardedGradScaler

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

__all__ = [
    "OSS",
    "FullyShardedDataParallel",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "StepModule",
    "auto_wrap",
    "check_optimizers",
    "default_auto_wrap_policy",
    "enable_wrap",
]


class StepModule(Module):
    """A module whose forward runs a step of the user's module.

    FairScale works around ``forward``, and a training calls ``training_step``.

    Args:
        module: The user's module; its parameters appear under ``module.``.
    """

    def __init__(self, module: Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step, which is a method of the user's module."""
        return step(*args, **kwargs)


def check_optimizers(optimizers: Sequence[Optimizer], module: Module) -> None:
    """Check the optimizers of a module.

    Raises:
        MisuseError: Two of them share a parameter, or one has parameters that are not the module's.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    owners: dict[int, int] = {}
    for index, optimizer in enumerate(optimizers):
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        strange = sum(id(parameter) not in names for parameter in parameters)
        if strange:
            raise MisuseError(
                f"the {type(optimizer).__name__} has {strange} of {len(parameters)} parameters that are none of "
                f"{type(module).__name__}'s: they were taken before the module was sharded, which replaces them; take "
                "all of them in configure_optimizers, from self.parameters()"
            )
        for parameter in parameters:
            first = owners.setdefault(id(parameter), index)
            if first != index:
                raise MisuseError(
                    f"optimizers {first} and {index} share the parameter {names[id(parameter)]!r}, and both "
                    "would apply its gradient: give each parameter to one of them"
                )
