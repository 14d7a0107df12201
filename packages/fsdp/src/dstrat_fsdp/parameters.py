"""Parameters before the first step: values of rank 0, materialization, shards parked between runs."""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError
from dstrat.parallel.full_state import copy_full, full_tensor
from dstrat.parallel.meta_device import parameter_reader, reset_method
from dstrat.parallel.shards import local_boxes, local_tensor, with_local
from dstrat_fsdp import internals

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


def materialize(
    module: Module,
    device: torch.device,
    shards: Mapping[tuple[Module, str], Tensor] = MappingProxyType({}),
    *,
    computes_parameters: bool = True,
    full_module: Module | None = None,
    foreign: Collection[Module] = (),
) -> None:
    """Allocate the tensors that are on the meta device, each rank its shards, and compute their values.

    Layer by layer, ``reset_parameters`` computes full tensors.  All ranks compute the same values, and keep their
    shards.  Layers with ``read_parameter`` read those of this rank only.

    Args:
        module: A sharded module.
        device: Device of the shards.
        shards: This rank's shards from an earlier run, by layer and name.
        computes_parameters: Whether to compute the other parameters; False leaves their values to a checkpoint.
        full_module: The module that has further layers, which this rank does not compute; None if there are none.
        foreign: Those of them that were made on the meta device.  Their buffers are computed, and their parameters too,
            one by one, and dropped: so random numbers are those of one device.

    Raises:
        MisuseError: A layer has no ``reset_parameters``.
    """
    names = {layer: meta_names for layer in _inner_first(module) if (meta_names := _meta_names(layer))}
    owned = _owned_names(names)
    if names:
        internals.allocate_meta_tensors(module, device)
    for layer in _inner_first(module if full_module is None else full_module):
        if layer in names:
            existing = {name: shards[layer, name] for name in owned[layer] if (layer, name) in shards}
            _fill(layer, names[layer], owned[layer], existing, computes_parameters=computes_parameters)
        elif layer in foreign:
            _fill_buffers(layer, device)


def made_on_meta(modules: Iterable[Module]) -> set[Module]:
    """Return the modules that have tensors of their own on the meta device."""
    return {module for module in modules if _meta_names(module)}


def parameter_attributes(module: Module) -> dict[tuple[Module, str], dict[str, Any]]:
    """Return the attributes that a user has set on parameters, by their layers and names."""
    return {(layer, name): _attributes(parameter) for layer, name, parameter in _direct_parameters(module.modules())}


def restore_attributes(attributes: Mapping[tuple[Module, str], Mapping[str, Any]]) -> None:
    """Set attributes on the parameters that have taken the place of those of :func:`parameter_attributes`."""
    for (layer, name), values in attributes.items():
        vars(getattr(layer, name)).update(values)


def _attributes(parameter: nn.Parameter) -> dict[str, Any]:
    return {name: value for name, value in vars(parameter).items() if name != "_is_param"}  # torch's, of DTensors


def _inner_first(module: Module) -> Iterator[Module]:
    """Yield the submodules in the order in which their constructors returned."""
    # So that random numbers are drawn in the order of a module that is not on the meta device.
    seen: set[int] = set()

    def visit(submodule: Module) -> Iterator[Module]:
        if id(submodule) in seen:
            return
        seen.add(id(submodule))
        for child in submodule.children():
            yield from visit(child)
        yield submodule

    return visit(module)


def _meta_names(layer: Module) -> list[str]:
    tensors = itertools.chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False))
    return [name for name, tensor in tensors if tensor.is_meta]


def _owned_names(names: Mapping[Module, list[str]]) -> dict[Module, set[str]]:
    """Return for each layer the names of the tensors that no earlier layer shares, whose values it computes."""
    seen: set[int] = set()
    owned: dict[Module, set[str]] = {}
    for layer, meta_names in names.items():
        tensors = {name: id(getattr(layer, name)) for name in meta_names}
        owned[layer] = {name for name, tensor in tensors.items() if tensor not in seen}
        seen.update(tensors.values())
    return owned


@torch.no_grad()
def _fill(
    layer: Module, names: list[str], owned: set[str], shards: Mapping[str, Tensor], *, computes_parameters: bool
) -> None:
    computed = (name for name in owned if computes_parameters or not isinstance(getattr(layer, name), nn.Parameter))
    missing = [name for name in computed if name not in shards]
    read = parameter_reader(layer)
    if read is not None:
        _read_shards(layer, missing, read)
    elif missing:
        _reset_layer(layer, names, owned)
    for name, shard in shards.items():
        local_tensor(getattr(layer, name)).copy_(shard)


@torch.no_grad()
def _fill_buffers(layer: Module, device: torch.device) -> None:
    """Compute the buffers of a layer that other ranks compute: every rank has all of them."""
    names = _meta_names(layer)
    buffers = [name for name, buffer in layer.named_buffers(recurse=False) if buffer.is_meta]
    for name in buffers:
        setattr(layer, name, torch.empty_like(getattr(layer, name), device=device))
    read = parameter_reader(layer)
    if read is not None:
        _read_shards(layer, buffers, read)
    else:
        _reset_layer(layer, names, set(buffers), device)


def _read_shards(layer: Module, names: Iterable[str], read: Callable[[str, tuple[slice, ...]], Tensor]) -> None:
    """Read this rank's shards of tensors of a layer by its ``read_parameter``."""
    for name in names:
        for box in local_boxes(getattr(layer, name), name):
            box.tensor.copy_(read(name, box.slices))


def _reset_layer(layer: Module, names: list[str], owned: set[str], device: torch.device | None = None) -> None:
    """Compute the full values of a layer, and keep this rank's shards of the owned tensors."""
    # Full tensors for a moment, of one layer at a time: the values are those of one device, on any number of ranks.
    reset = reset_method(layer, names)
    sharded = {name: getattr(layer, name) for name in names}
    for name, tensor in sharded.items():
        full = torch.empty(tensor.shape, dtype=tensor.dtype, device=device or local_tensor(tensor).device)
        setattr(layer, name, nn.Parameter(full, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else full)
    reset()
    for name, tensor in sharded.items():
        full = getattr(layer, name)
        setattr(layer, name, tensor)
        if name in owned:
            copy_full(tensor, full)


# Shards parked between runs
#
# A run leaves its shards in the module, on the CPU, and the next run with the same layout continues with them.


_parked: weakref.WeakKeyDictionary[Module, _EarlierRun] = weakref.WeakKeyDictionary()

_SHARDED_NOTE = "the run has ended, and this process has one shard of each parameter"
_FULL_AFTER_RUNS = 'state_dict_type="full" of a strategy without stages (pp) a run leaves whole parameters on each rank'


@dataclass(frozen=True, kw_only=True, slots=True)
class _EarlierRun:
    """The run that left its shards in a module.

    Attributes:
        layout: What determines which part of the state this rank has, by name.
        is_reusable: Whether another run can use them; false if layers communicate by themselves.
        has_failed: Whether it has raised an error on this rank.
        hooks: Hooks on the layers, for uses between two runs.
    """

    layout: Mapping[str, Any]
    is_reusable: bool
    has_failed: bool
    hooks: Sequence[RemovableHandle]


def park_shards(module: Module, layout: Mapping[str, Any], *, is_reusable: bool, has_failed: bool) -> None:
    """Move the shards of a module to the CPU until its next run; of one process they are plain tensors.

    Until then ``load_state_dict`` takes full tensors, of which each rank copies its shard.  A forward pass and
    ``state_dict`` raise an error.

    Args:
        module: Its parameters are DTensors; no unit is gathered.
        layout: What determines which part of the state this rank has, by name.
        is_reusable: Whether another run can use the shards.
        has_failed: Whether this run has raised an error on this rank.
    """
    is_complete = (
        is_reusable
        and all(_is_complete(parameter) for _, _, parameter in _sharded_parameters(module))
        and not any(parameter.is_meta for parameter in module.parameters())  # layers that other ranks compute
    )

    def on_cpu(parameter: DTensor) -> Any:
        local = local_tensor(parameter.detach()).cpu()
        return local if is_complete else with_local(parameter, local)

    _replace_sharded(module, on_cpu)
    if any(True for _ in _sharded_parameters(module)):
        hooks = _guard_between_runs(module)
        _parked[module] = _EarlierRun(layout=layout, is_reusable=is_reusable, has_failed=has_failed, hooks=hooks)


def gather_parameters(module: Module) -> None:
    """Gather the parameters of a module on the CPU of each rank, one after the other; collective."""
    _replace_sharded(module, lambda parameter: full_tensor(parameter).cpu())


def check_reusable(module: Module) -> None:
    """Raise MisuseError if an earlier run has split a module, to whose groups of processes its layers belong."""
    parked, name = _parked.get(module), type(module).__name__
    if parked is not None and not parked.is_reusable:
        raise MisuseError(
            f"the computation of {name} was divided by an earlier run, to whose groups of processes its layers belong: "
            f"create a new module and load a checkpoint, as trainer.test({name}(), ckpt_path=...) does"
        )


def is_parked(module: Module) -> bool:
    """Return whether an earlier run has left its shards in a module."""
    return module in _parked


def check_stages(module: Module, layers: Module) -> None:
    """Check that an earlier run of a module has not failed, and has left the shards of a rank's layers on it.

    Args:
        module: The user's module.
        layers: Those of its layers that the rank computes.

    Raises:
        MisuseError: It has not.
    """
    parked, name = _parked.get(module), type(module).__name__
    if parked is None:
        return
    if parked.has_failed:
        raise MisuseError(
            f"an earlier run of {name} has failed, after which its stages can be those of different steps: create a "
            "new module and load a checkpoint"
        )
    if any(parameter.is_meta for parameter in layers.parameters()):
        raise MisuseError(
            f"an earlier run has divided the layers of {name} into other stages, so that their parameters are on other "
            "ranks: create a new module and load a checkpoint"
        )


def unpark_shards(module: Module, layout: Mapping[str, Any]) -> dict[tuple[Module, str], Tensor] | None:
    """Return this rank's shards of an earlier run by layer and name, and move its parameters to the meta device.

    Args:
        module: The user's module.
        layout: What determines which part of the state this rank has in this run, by name.

    Returns:
        None without an earlier run.

    Raises:
        MisuseError: They were made for another layout.
    """
    parked = _parked.get(module)
    if parked is None:
        return None
    if layout != parked.layout:
        raise MisuseError(
            f"{type(module).__name__} is sharded over {_described(parked.layout)} by an earlier run; this run uses "
            f"{_described(layout)}: create a new module and load a checkpoint"
        )
    # As they are now: they may have been replaced between the runs.
    shards = {(layer, name): local_tensor(value.detach()) for layer, name, value in _sharded_parameters(module)}
    discard_shards(module)
    return shards


def _described(layout: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in layout.items())


def discard_shards(module: Module) -> None:
    """Move a module with parked shards to the meta device, so that they are made anew."""
    parked = _parked.pop(module, None)
    if parked is not None:
        for hook in parked.hooks:
            hook.remove()
        _replace_sharded(module, empty_on_meta)


def discard_parameters(module: Module) -> None:
    """Move the parameters of a module that are to be sharded, and are not yet, to the meta device."""
    # Scalars are not sharded.
    replace_parameters(
        module.modules(), empty_on_meta, lambda parameter: not isinstance(parameter, DTensor) and parameter.dim() > 0
    )


def empty_on_meta(parameter: Tensor) -> Tensor:
    """Return a tensor on the meta device, with shape and dtype only."""
    return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")


def _replace_sharded(module: Module, convert: Callable[[DTensor], Tensor]) -> None:
    replace_parameters(module.modules(), convert, lambda parameter: isinstance(parameter, DTensor))


def replace_parameters(
    layers: Iterable[Module], convert: Callable[[Any], Tensor], is_replaced: Callable[[Any], bool] | None = None
) -> None:
    """Replace the parameters that layers have themselves; those that share one share its replacement.

    Args:
        layers: The layers.
        convert: Returns the tensor that replaces a parameter, whose attributes and ``requires_grad`` are kept.
        is_replaced: Returns whether to replace a parameter; None replaces all.
    """
    replaced: dict[int, nn.Parameter] = {}
    for layer, name, parameter in list(_direct_parameters(layers)):  # alive, so that no id is used again
        if is_replaced is not None and not is_replaced(parameter):
            continue
        if id(parameter) not in replaced:
            replaced[id(parameter)] = nn.Parameter(convert(parameter), parameter.requires_grad)
            vars(replaced[id(parameter)]).update(_attributes(parameter))
        setattr(layer, name, replaced[id(parameter)])


def _sharded_parameters(module: Module) -> Iterator[tuple[Module, str, Any]]:
    return (each for each in _direct_parameters(module.modules()) if isinstance(each[2], DTensor))


def _direct_parameters(layers: Iterable[Module]) -> Iterator[tuple[Module, str, Any]]:
    """Yield the parameters that layers have themselves with these, also those that several layers share."""
    for layer in layers:
        parameters: list[tuple[str, Any]] = list(layer.named_parameters(recurse=False, remove_duplicate=False))
        for name, parameter in parameters:
            yield layer, name, parameter


def _is_complete(parameter: DTensor) -> bool:
    """Return whether this rank has all elements of a parameter: it is replicated, or sharded over one process."""
    mesh = parameter.device_mesh
    return all(placement.is_replicate() or mesh.size(dim) == 1 for dim, placement in enumerate(parameter.placements))


def _sharded_layers(module: Module) -> list[Module]:
    return [*{layer: None for layer, _, _ in _sharded_parameters(module)}]


def accept_full_tensors(module: Module) -> list[RemovableHandle]:
    """Register hooks by which ``load_state_dict`` takes full tensors too, of which each rank copies its shards."""
    return [layer.register_load_state_dict_pre_hook(_load_shards) for layer in _sharded_layers(module)]


def _guard_between_runs(module: Module) -> list[RemovableHandle]:
    """Register hooks on layers with shards, which load full tensors and refuse uses that need communication."""
    hooks = accept_full_tensors(module)
    for layer in _sharded_layers(module):
        hooks.append(layer.register_state_dict_pre_hook(_refuse_state_dict))
        hooks.append(layer.register_forward_pre_hook(_refuse_forward))
    return hooks


def _load_shards(layer: Module, state: dict[str, Any], prefix: str, *_args: Any) -> None:
    """Copy this rank's shards of the full tensors that ``load_state_dict`` received."""
    for name, parameter in layer.named_parameters(recurse=False):
        full = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(full, Tensor) and full.shape == parameter.shape:
            if isinstance(full, DTensor):
                continue
            copy_full(parameter, full)
            state[prefix + name] = parameter  # which torch then copies onto itself, or assigns


def _refuse_state_dict(layer: Module, prefix: str, _keep_vars: bool) -> None:
    raise MisuseError(
        f"the state dict of {prefix.rstrip('.') or type(layer).__name__} cannot be gathered: {_SHARDED_NOTE}. "
        "Checkpoints of the run, such as those of ModelCheckpoint(save_last=True), have everything, "
        "trainer.strategy.module_state_dict() gathers it in a hook of the run such as on_train_end, and with "
        f"{_FULL_AFTER_RUNS}"
    )


def _refuse_forward(layer: Module, _args: Any) -> None:
    raise MisuseError(
        f"{type(layer).__name__} cannot compute: {_SHARDED_NOTE}. trainer.test and trainer.predict gather them, and "
        f"with {_FULL_AFTER_RUNS}"
    )
