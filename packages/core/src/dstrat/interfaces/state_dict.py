"""State dicts: names of optimizer state, and checks that a state fits what loads it."""

from __future__ import annotations

import logging
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from torch.nn import Module
    from torch.optim import Optimizer


_MOST_NAMES = 20

_log = logging.getLogger(__name__)


def load_by_names(
    module: Module, state: Mapping[str, Any], *, label: str = "the weights"
) -> tuple[list[str], list[str]]:
    """Load the weights that a module has; return the names of those that are missing, and of those left over.

    Args:
        module: On any device.
        state: Tensors by name.
        label: What they are called in messages.

    Raises:
        CheckpointError: Shapes differ.
    """
    try:
        result = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reasons = "; ".join(line.strip().rstrip(".") for line in str(error).splitlines()[1:]) or str(error)
        raise CheckpointError(f"{label} do not fit {type(module).__name__}: {reasons}") from error
    missing, unexpected = result or ((), ())  # some modules' own load_state_dict returns nothing
    return list(missing), list(unexpected)


def check_names(
    module: Module,
    missing: Iterable[str],
    unexpected: Iterable[str],
    *,
    strict: bool,
    label: str = "the weights",
    advice: str = "set strict_loading = False on it",
    logs: bool = True,
) -> None:
    """Raise an error where weights are missing or left over, or tell of it.

    Args:
        module: What they were loaded into.
        missing: Names that the module has alone.
        unexpected: Names that the state has alone.
        strict: Whether they are an error; otherwise they are logged.
        label: What the weights are called in messages.
        advice: What lets the others be loaded.
        logs: Whether this process logs.

    Raises:
        CheckpointError: There are some, and it is strict.
    """
    sides = (("missing", list(missing)), ("left over", list(unexpected)))
    mismatches = [f"{side} {listed(names)}" for side, names in sides if names]
    if not mismatches:
        return
    message = f"{label} do not fit {type(module).__name__}: {'; '.join(mismatches)}"
    if strict:
        raise CheckpointError(f"{message}. Make the module as it was trained, or {advice} to load the others")
    if logs:
        _log.warning("%s; the others are loaded", message)


def misfit(module: Module, targets: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool) -> str | None:
    """Return why a state cannot be copied into tensors of a module, and None where it can; nothing is copied.

    Args:
        module: Whose tensors they are.
        targets: By name, with their whole shapes.
        state: Whole tensors by name.
        strict: Whether missing names and those left over are a reason; otherwise they are logged.
    """
    for name, target in targets.items():
        if is_extra_state(name):
            continue
        if name in state and hasattr(target, "shape") and tuple(target.shape) != tuple(state[name].shape):
            return (
                f"the weights do not fit {type(module).__name__}: {name} has the shape {tuple(state[name].shape)}, and "
                f"the module's has {tuple(target.shape)}"
            )
    missing = [name for name in targets if name not in state]
    unexpected = [name for name in state if name not in targets]
    try:
        check_names(module, missing, unexpected, strict=strict)
    except CheckpointError as error:
        return str(error)
    return None


def is_extra_state(name: str) -> bool:
    """Return whether a name in a module's state is of what ``get_extra_state`` has made of a layer, of any kind."""
    return name.rpartition(".")[2] == "_extra_state"


def groups_misfit(optimizer: Optimizer, groups: Sequence[Sequence[Any]], saved: Sequence[Sequence[Any]]) -> str | None:
    """Return why the state of an optimizer is not of the parameters that it has, as far as their numbers show it.

    Args:
        optimizer: Of these parameters.
        groups: The parameters of each group, or what stands for them.
        saved: The same of the state.
    """
    if list(map(len, groups)) == list(map(len, saved)):
        return None
    return (
        f"the optimizer's state in the checkpoint is of {_describe(saved)}, and {type(optimizer).__name__} has "
        f"{_describe(groups)} here"
    )


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many there are besides."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _describe(groups: Sequence[Sequence[Any]]) -> str:
    sizes = [str(len(group)) for group in groups]
    if len(sizes) == 1:
        return f"1 group of {sizes[0]} parameter{'s' * (sizes != ['1'])}"
    return f"{len(sizes)} groups of {', '.join(sizes[:-1])} and {sizes[-1]} parameters" if sizes else "no parameters"


# The state of an optimizer by the names of its parameters, rather than by their numbers.
#
# The shape is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.


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
    current, saved = _group_names(optimizer, module), [list(group["params"]) for group in state["param_groups"]]
    _check_groups(optimizer, module, current, saved)
    numbers = {name: index for index, name in enumerate(chain.from_iterable(current))}
    optimizer.load_state_dict(
        {
            "state": {numbers[name]: entry for name, entry in state["state"].items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in names]}  # in the order here, which torch goes by
                for group, names in zip(state["param_groups"], current, strict=True)
            ],
        }
    )


def _check_groups(optimizer: Optimizer, module: Module, current: list[list[str]], saved: list[list[str]]) -> None:
    current_names, saved_names = set(chain.from_iterable(current)), set(chain.from_iterable(saved))
    missing, unexpected = sorted(current_names - saved_names), sorted(saved_names - current_names)
    if unexpected or missing:
        raise CheckpointError(
            f"the optimizer's state in the checkpoint is of other parameters than those of {type(module).__name__}: "
            f"missing are {listed(missing) or 'none'}; left over are {listed(unexpected) or 'none'}"
        )
    mismatch = groups_misfit(optimizer, current, saved)
    if mismatch is not None:
        raise CheckpointError(mismatch)
    moved = [
        name
        for names, saved_group in zip(current, saved, strict=True)
        for name in names
        if name not in set(saved_group)
    ]
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
    names = {id(parameter): name.replace(_COMPILED, "") for name, parameter in module.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(id(parameter), f"<parameter {index}>") for index, parameter in enumerate(parameters)]
