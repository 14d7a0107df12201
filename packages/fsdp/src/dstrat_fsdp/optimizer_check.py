"""Checking that optimizers have the parameters that are trained, and each of them once."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.nn import Module
    from torch.optim import Optimizer


def check_optimizers(optimizers: Sequence[Optimizer], module: Module) -> None:
    """Check the optimizers of a module that has been sharded.

    Raises:
        MisuseError: Two of them share a parameter, or one has parameters of before the module was sharded.
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
                    f"optimizers {first} and {index} share the parameter {names.get(id(parameter), '?')!r}, and both "
                    "would apply its gradient: give each parameter to one of them"
                )
