"""The state of an optimizer by the names of its parameters, rather than by their numbers.

The shape is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.errors import CheckpointError

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
        CheckpointError: The state is of other parameters.
    """
    names = _names(optimizer, module)
    numbers = {name: index for index, name in enumerate(names)}
    saved = [name for group in state["param_groups"] for name in group["params"]]
    unknown, missing = sorted(set(saved) - set(names)), sorted(set(names) - set(saved))
    if unknown or missing:
        raise CheckpointError(
            f"the optimizer's state in the checkpoint is of other parameters than those of {type(module).__name__}: "
            f"missing are {', '.join(missing) or 'none'}; left over are {', '.join(unknown) or 'none'}"
        )
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: entry for name, entry in state["state"].items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in group["params"]]} for group in state["param_groups"]
            ],
        }
    )


def _names(optimizer: Optimizer, module: Module) -> list[str]:
    """Return the name of each parameter of an optimizer, in its order."""
    known = {id(parameter): name.replace(_COMPILED, "") for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [known.get(id(parameter), f"<parameter {index}>") for index, parameter in enumerate(parameters)]
