"""The state of an optimizer by the names of its parameters, rather than by their numbers.

The shape is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.
"""

from __future__ import annotations

from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from dstrat.errors import CheckpointError
from dstrat.interfaces.fitting import groups_misfit, listed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module
    from torch.optim import Optimizer


_COMPILED = "_orig_mod."  # what torch.compile puts before the names of what it wraps


def named_state(optimizer: Optimizer, module: Module) -> dict[str, Any]:
    """Return the state of an optimizer by the names that its parameters have in the module."""
    state, names = optimizer.state_dict(), _names(optimizer, module)
    return {
        "state": {names[index]: entry for index, entry in state["state"].items()},
        "param_groups": [
            group | {"params": [names[index] for index in group["params"]]} for group in state["param_groups"]
        ],
    }


def load_named_state(optimizer: Optimizer, module: Module, state: Mapping[str, Any]) -> None:
    """Load what :func:`named_state` returned.

    Raises:
        CheckpointError: The state is of other parameters, or has them in other groups.
    """
    own, saved = _group_names(optimizer, module), [list(group["params"]) for group in state["param_groups"]]
    _check_groups(optimizer, module, own, saved)
    numbers = {name: index for index, name in enumerate(chain.from_iterable(own))}
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: entry for name, entry in state["state"].items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in names]}  # in the order here, which torch goes by
                for group, names in zip(state["param_groups"], own, strict=True)
            ],
        }
    )


def _check_groups(optimizer: Optimizer, module: Module, own: list[list[str]], saved: list[list[str]]) -> None:
    here, there = set(chain.from_iterable(own)), set(chain.from_iterable(saved))
    missing, unknown = sorted(here - there), sorted(there - here)
    if unknown or missing:
        raise CheckpointError(
            f"the optimizer's state in the checkpoint is of other parameters than those of {type(module).__name__}: "
            f"missing are {listed(missing) or 'none'}; left over are {listed(unknown) or 'none'}"
        )
    found = groups_misfit(optimizer, own, saved)
    if found is not None:
        raise CheckpointError(found)
    moved = [name for names, others in zip(own, saved, strict=True) for name in names if name not in set(others)]
    if moved:
        raise CheckpointError(
            f"the optimizer's state in the checkpoint has parameters in other groups than {type(optimizer).__name__} "
            f"has them here: {listed(moved)}"
        )


def _group_names(optimizer: Optimizer, module: Module) -> list[list[str]]:
    """Return the names of the parameters in each group."""
    names = iter(_names(optimizer, module))
    return [list(islice(names, len(group["params"]))) for group in optimizer.param_groups]


def _names(optimizer: Optimizer, module: Module) -> list[str]:
    """Return the name of each parameter of an optimizer, in its order."""
    known = {id(parameter): name.replace(_COMPILED, "") for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(id(parameter), f"<parameter {index}>") for index, parameter in enumerate(parameters)]
