"""State dicts: checks against modules and optimizers, and optimizer state by the names of parameters."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from itertools import chain, islice
from typing import TYPE_CHECKING, Any

from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

    from torch import Tensor
    from torch.nn import Module, Parameter
    from torch.optim import Optimizer


_MOST_NAMES = 20

_log = logging.getLogger(__name__)


# Names of weights in checkpoints
#
# torch.compile(layer) and checkpoint_wrapper(layer) return modules that contain the layer, whose names have a component
# more in named_parameters().  A checkpoint fits a module with and without them.


_COMPILED = "_orig_mod"
_WRAPPERS = {_COMPILED, "_checkpoint_wrapped_module"}


def canonical_name(name: str) -> str:
    """Return the name that a weight or layer has in checkpoints, without the components of torch's wrappers."""
    return ".".join(component for component in name.split(".") if component not in _WRAPPERS)


def canonical_parameters(module: Module) -> dict[str, Parameter]:
    """Return the parameters of a module, each once, by their names in checkpoints."""
    return {canonical_name(name): parameter for name, parameter in module.named_parameters()}


def canonical_buffers(module: Module) -> dict[str, Tensor]:
    """Return the buffers of a module by all their names in checkpoints."""
    return {canonical_name(name): buffer for name, buffer in module.named_buffers(remove_duplicate=False)}


def named_weights(module: Module) -> dict[str, Any]:
    """Return the parameters and buffers of a module by all their names in checkpoints."""
    weights = chain(module.named_parameters(remove_duplicate=False), module.named_buffers(remove_duplicate=False))
    return {canonical_name(name): weight for name, weight in weights}


def with_names_of(names: Iterable[str], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state by the names that a module's state has, of which either may have those of torch's wrappers."""
    names_of_module = {canonical_name(name): name for name in names}
    return {names_of_module.get(canonical_name(name), name): value for name, value in state.items()}


@contextmanager
def uncompiled_names(module: Module) -> Iterator[None]:
    """Let a module's state dicts have the names of the layers in ``torch.compile(layer)``, in a ``with`` block.

    It loads states with and without the names of torch's wrappers.
    """
    handles = [
        module.register_state_dict_post_hook(_remove_wrappers),
        module.register_load_state_dict_pre_hook(_match_wrappers),
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _remove_wrappers(_module: Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for names in (state, getattr(state, "_metadata", {})):  # versions of layers by name, too
        _rename(names, lambda name: prefix + canonical_name(name[len(prefix) :]) if name.startswith(prefix) else name)


def _match_wrappers(module: Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
    _remove_wrappers(module, state, prefix, None)  # torch's checkpoint_wrapper adds its own component itself
    for name, layer in module.named_modules(remove_duplicate=False):  # outer ones first
        if _COMPILED in layer._modules:  # noqa: SLF001 - a wrapper of the user's may pass on attributes of its layer
            outer = f"{prefix}{name}." if name else prefix
            inner = f"{outer}{_COMPILED}."

            def wrapped(key: str, outer: str = outer, inner: str = inner) -> str:
                return inner + key[len(outer) :] if key.startswith(outer) else key

            _rename(state, wrapped)


def _rename(state: dict[str, Any], name_of: Callable[[str], str]) -> None:
    """Rename the entries of a dict in place, as its other users keep it."""
    renamed = {name_of(name): value for name, value in state.items()}
    if list(renamed) != list(state):
        state.clear()
        state.update(renamed)


def load_by_names(
    module: Module, state: Mapping[str, Any], *, label: str = "the weights"
) -> tuple[list[str], list[str]]:
    """Load the weights that a module has; return the missing and the unexpected names.

    Args:
        module: A module on any device.
        state: Tensors by name.
        label: Name of the weights in messages.

    Raises:
        CheckpointError: Shapes differ.
    """
    try:
        result = module.load_state_dict(state, strict=False)
    except RuntimeError as error:
        reasons = "; ".join(line.strip().rstrip(".") for line in str(error).splitlines()[1:]) or str(error)
        raise CheckpointError(f"{label} do not fit {type(module).__name__}: {reasons}") from error
    missing, unexpected = result or ((), ())  # an overridden load_state_dict may return None
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
    """Raise an error for missing and unexpected weights, or log them.

    Args:
        module: The module that loaded the weights.
        missing: Names that only the module has.
        unexpected: Names that only the state has.
        strict: Whether they are an error; otherwise they are logged.
        label: Name of the weights in messages.
        advice: How to load the others, for the message.
        logs: Whether this process logs.

    Raises:
        CheckpointError: ``strict``, and a name is missing or unexpected.
    """
    sides = (("missing", list(missing)), ("unexpected", list(unexpected)))
    mismatches = [f"{side} {listed(names)}" for side, names in sides if names]
    if not mismatches:
        return
    message = f"{label} do not fit {type(module).__name__}: {'; '.join(mismatches)}"
    if strict:
        raise CheckpointError(f"{message}. Make the module as it was trained, or {advice} to load the others")
    if logs:
        _log.warning("%s; the others are loaded", message)


def misfit(module: Module, targets: Mapping[str, Any], state: Mapping[str, Any], *, strict: bool) -> str | None:
    """Return why a state cannot be copied into tensors of a module, or None; nothing is copied.

    Args:
        module: The module, for the message.
        targets: The module's tensors by name, with their full shapes.
        state: Full tensors by name.
        strict: Whether missing and unexpected names are a reason; otherwise they are logged.
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
    """Return whether a name in a module's state belongs to the result of a layer's ``get_extra_state``."""
    return name.rpartition(".")[2] == "_extra_state"


def is_streamed(name: str, selects: Callable[[str], bool] | None) -> bool:
    """Return whether a name in a module's state is one of a stream of weights, of which a program may select some."""
    return not is_extra_state(name) and (selects is None or selects(name))


def groups_misfit(optimizer: Optimizer, groups: Sequence[Sequence[Any]], saved: Sequence[Sequence[Any]]) -> str | None:
    """Return why a state has other groups or numbers of parameters than an optimizer, or None.

    Args:
        optimizer: The optimizer, for the message.
        groups: The parameters of each of its groups, or their names.
        saved: The parameters of each group of the state.
    """
    if list(map(len, groups)) == list(map(len, saved)):
        return None
    return (
        f"the optimizer's state in the checkpoint is of {_describe(saved)}, and {type(optimizer).__name__} has "
        f"{_describe(groups)} here"
    )


def listed(names: Sequence[str]) -> str:
    """Return the first names, and the number of others."""
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return ", ".join(names[:_MOST_NAMES]) + more


def _describe(groups: Sequence[Sequence[Any]]) -> str:
    sizes = [str(len(group)) for group in groups]
    if len(sizes) == 1:
        return f"1 group of {sizes[0]} parameter{'s' * (sizes != ['1'])}"
    return f"{len(sizes)} groups of {', '.join(sizes[:-1])} and {sizes[-1]} parameters" if sizes else "no parameters"


# State of an optimizer by the names of its parameters
#
# The shape is that of ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict``.


def named_state(optimizer: Optimizer, module: Module) -> dict[str, Any]:
    """Return the state of an optimizer by the names that its parameters have in the module.

    Other keys of ``state``, and keys beside it, stay as they are.
    """
    state = optimizer.state_dict()
    if not has_standard_layout(state):  # of a wrapper: loaded as it is
        return dict(state)
    return _renamed(state, dict(enumerate(_names(optimizer, module))))


def has_standard_layout(state: Mapping[str, Any]) -> bool:
    """Return whether the state of an optimizer has the layout of ``torch.optim.Optimizer.state_dict``."""
    return "state" in state and "param_groups" in state


def load_named_state(optimizer: Optimizer, module: Module, state: Mapping[str, Any]) -> None:
    """Load a state that :func:`named_state` returned.

    Raises:
        CheckpointError: The state has other parameters, or has them in other groups.
    """
    if not has_standard_layout(state):
        optimizer.load_state_dict(dict(state))
        return
    current, saved = parameter_names(optimizer, module), group_names(state)
    _check_groups(optimizer, module, current, saved)
    numbers = {name: index for index, name in enumerate(chain.from_iterable(current))}
    optimizer.load_state_dict(
        {
            **state,
            "state": {numbers.get(name, name): entry for name, entry in state["state"].items()},
            "param_groups": [
                {**group, "params": [numbers[name] for name in names]}  # in the optimizer's order, which torch requires
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
            f"missing are {listed(missing) or 'none'}; unexpected are {listed(unexpected) or 'none'}"
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


def parameter_names(optimizer: Optimizer, module: Module) -> list[list[str]]:
    """Return the names of the parameters in each group of an optimizer."""
    names = iter(_names(optimizer, module))
    return [list(islice(names, len(group["params"]))) for group in optimizer.param_groups]


def _names(optimizer: Optimizer, module: Module) -> list[str]:
    """Return the name of each parameter of an optimizer, in its order."""
    names = {id(parameter): name for name, parameter in canonical_parameters(module).items()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return [names.get(id(parameter), f"<parameter {index}>") for index, parameter in enumerate(parameters)]


# Names and numbers of parameters


def group_names(state: Mapping[str, Any]) -> list[list[Any]]:
    """Return the names or numbers of the parameters in each group of an optimizer's state."""
    return [list(group["params"]) for group in state.get("param_groups", ())]


def number_parameters(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state with parameters by number, as in ``Optimizer.state_dict``, instead of by name."""
    names = chain.from_iterable(group_names(state))
    return _renamed(state, {name: number for number, name in enumerate(names)})


def name_parameters(state: Mapping[str, Any], names: Sequence[Sequence[str]]) -> dict[str, Any]:
    """Return the result of ``Optimizer.state_dict`` with parameters by name instead of by number.

    Args:
        state: By number; a parameter without a name is called by its number.
        names: Names of the parameters in each group.
    """
    numbers = chain.from_iterable(group_names(state))
    return _renamed(state, {number: str(number) for number in numbers} | dict(enumerate(chain.from_iterable(names))))


def _renamed(state: Mapping[str, Any], keys: Mapping[Any, Any]) -> dict[str, Any]:
    return {
        **state,
        "state": {keys.get(key, key): entry for key, entry in state["state"].items()},
        "param_groups": [
            {**group, "params": [keys[key] for key in group["params"]]} for group in state["param_groups"]
        ],
    }
