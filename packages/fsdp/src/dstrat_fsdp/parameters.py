"""Parameters before the first step: values of rank 0, materialization, shards parked between runs."""

from __future__ import annotations

import itertools
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dstrat.checkpoint.whole_state import copy_whole, whole_of
from dstrat.errors import MisuseError
from dstrat_fsdp.state import with_local

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle


_RESETS = ("reset_parameters", "_reset_parameters")  # torch's own layers have either


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Let parameters that a module registers be on the meta device; buffers are made as always.

    Only one parameter at a time is ever in memory, as it is left behind when it is registered.  One that is split in
    the place of a frozen one is frozen too, which torch's tensor parallelism forgets.
    """
    register = nn.Module.register_parameter

    def register_on_meta(module: Module, name: str, param: Any) -> None:
        if isinstance(param, DTensor):
            replaced = module._parameters.get(name)  # noqa: SLF001 - getattr would need it to be there
            param.requires_grad_(param.requires_grad and (replaced is None or replaced.requires_grad))
        elif param is not None and not param.is_meta:
            param = type(param)(param.to("meta"), requires_grad=param.requires_grad)
        register(module, name, param)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign,assignment]  # there is no hook for one thread
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]  # as above


def materialize(module: Module, device: torch.device, known: Callable[[Module, str], Tensor | None]) -> None:
    """Give memory and values to what is on the meta device; on each rank for its shards only.

    A layer's values are computed whole, by its ``reset_parameters``, before the next layer's are: all ranks compute
    the same ones, and keep their parts.

    Args:
        module: Sharded.
        device: Where shards go.
        known: Returns this rank's shard of a layer's parameter where it has one already.

    Raises:
        MisuseError: A layer has no ``reset_parameters``.
    """
    names = {layer: found for layer in _inner_first(module) if (found := _meta_names(layer))}
    owned = _first_owners(names)
    if names:
        module._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)  # noqa: SLF001 - as to_empty does, which would empty everything
    for layer, found in names.items():
        _fill(layer, found, owned[layer], known)


def _inner_first(module: Module) -> Iterator[Module]:
    """Yield the parts of a module in the order in which their constructors have ended."""
    seen: set[int] = set()

    def visit(part: Module) -> Iterator[Module]:
        if id(part) in seen:
            return
        seen.add(id(part))
        for child in part.children():
            yield from visit(child)
        yield part

    return visit(module)


def _meta_names(layer: Module) -> list[str]:
    own = itertools.chain(layer.named_parameters(recurse=False), layer.named_buffers(recurse=False))
    return [name for name, tensor in own if tensor.is_meta]


def _first_owners(names: Mapping[Module, list[str]]) -> dict[Module, set[str]]:
    """Return for each layer the names whose values are its own, and not those of a layer that it shares them with."""
    seen: set[int] = set()
    owned: dict[Module, set[str]] = {}
    for layer, found in names.items():
        tensors = {name: id(getattr(layer, name)) for name in found}
        owned[layer] = {name for name, tensor in tensors.items() if tensor not in seen}
        seen.update(tensors.values())
    return owned


@torch.no_grad()
def _fill(layer: Module, names: list[str], owned: set[str], known: Callable[[Module, str], Tensor | None]) -> None:
    shards = {name: known(layer, name) for name in owned}
    if any(shard is None for shard in shards.values()):
        _compute(layer, names, owned)
    for name, shard in shards.items():
        if shard is not None:
            _local(getattr(layer, name)).copy_(shard)


def _compute(layer: Module, names: list[str], owned: set[str]) -> None:
    """Let a layer compute its values whole, and keep this rank's parts of those that are its own."""
    reset = next((getattr(layer, name) for name in _RESETS if hasattr(layer, name)), None)
    if reset is None:
        raise MisuseError(
            f"{type(layer).__name__} was made without memory, and nothing computes the first values of its "
            f"{', '.join(map(repr, names))}: give it a method reset_parameters(self)"
        )
    sharded = {name: getattr(layer, name) for name in names}
    for name, tensor in sharded.items():
        whole = torch.empty(tensor.shape, dtype=tensor.dtype, device=_local(tensor).device)
        setattr(layer, name, nn.Parameter(whole, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else whole)
    reset()
    for name, tensor in sharded.items():
        whole = getattr(layer, name)
        setattr(layer, name, tensor)
        if name in owned:
            copy_whole(tensor, whole)


def _local(tensor: Any) -> Any:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


# The shards that a run leaves in a module, so that the next run can go on with them.


_resting: weakref.WeakKeyDictionary[Module, RestingShards] = weakref.WeakKeyDictionary()

_AFTER_THE_RUN = "the run has ended, and this process has one shard of each parameter"


@dataclass(frozen=True, kw_only=True, slots=True)
class RestingShards:
    """Shards of parameters on the CPU, and the mesh that they were made for.

    Attributes:
        shards: This rank's part of each parameter, by layer and name.
        mesh_shape: The shape of the mesh.
        coordinate: Where in it this process was.
        can_go_on: Whether another run can take them: not where layers communicate by themselves.
        hooks: Of the layers, for uses between two runs.
    """

    shards: dict[tuple[Module, str], Tensor]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    can_go_on: bool
    hooks: Sequence[RemovableHandle]

    def shard(self, layer: Module, name: str) -> Tensor | None:
        """Return this rank's part of a parameter of a layer; None where it was not sharded."""
        return self.shards.get((layer, name))


def put_to_rest(module: Module, mesh: DeviceMesh, *, can_go_on: bool) -> None:
    """Keep the shards of a module on the CPU for its next run; parameters that this rank has whole are plain tensors.

    Until then the module loads whole tensors, of which each rank takes its part; forward and state dict are errors.

    Args:
        module: Its parameters are DTensors; nothing of it is gathered.
        mesh: The mesh that they are sharded over.
        can_go_on: Whether another run can take them.
    """
    shards = {}
    is_whole = can_go_on and all(_is_whole(parameter) for _, _, parameter in _sharded_parameters(module))
    for layer, name, parameter in _sharded_parameters(module):
        local = parameter.detach().to_local().cpu()
        value = local if is_whole else with_local(parameter, local)
        setattr(layer, name, nn.Parameter(value, parameter.requires_grad))
        shards[layer, name] = local
    if shards and not is_whole:
        _resting[module] = RestingShards(
            shards=shards,
            mesh_shape=tuple(mesh.shape),
            coordinate=tuple(mesh.get_coordinate() or ()),
            can_go_on=can_go_on,
            hooks=_guard_between_runs(module),
        )


def make_whole(module: Module) -> None:
    """Gather the parameters of a module on the CPU of each rank, one after the other; collective."""
    for layer, name, parameter in _sharded_parameters(module):
        whole = whole_of(parameter).cpu()
        setattr(layer, name, nn.Parameter(whole, parameter.requires_grad))


def wake(module: Module, mesh: DeviceMesh) -> RestingShards | None:
    """Return the shards that an earlier run left in a module, whose parameters are then on the meta device.

    Args:
        module: The user's module.
        mesh: The mesh of this run.

    Raises:
        MisuseError: They were made for another mesh.
    """
    resting = _resting.pop(module, None)
    if resting is None:
        return None
    place = (tuple(mesh.shape), tuple(mesh.get_coordinate() or ()))
    if not resting.can_go_on or place != (resting.mesh_shape, resting.coordinate):
        _resting[module] = resting
        raise MisuseError(
            f"an earlier run has left {type(module).__name__} sharded over a mesh of {resting.mesh_shape}, which this "
            f"run, over {tuple(mesh.shape)}, cannot take: build the module anew and load a checkpoint of it"
        )
    for hook in resting.hooks:
        hook.remove()
    for layer, name, parameter in _sharded_parameters(module):
        whole = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
        setattr(layer, name, nn.Parameter(whole, parameter.requires_grad))
    return resting


def _sharded_parameters(module: Module) -> Iterator[tuple[Module, str, Any]]:
    for layer in module.modules():
        own: list[tuple[str, Any]] = list(layer.named_parameters(recurse=False))
        for name, parameter in own:
            if isinstance(parameter, DTensor):
                yield layer, name, parameter


def _is_whole(parameter: DTensor) -> bool:
    """Return whether a parameter is sharded over meshes of one process only, and so on every rank."""
    mesh = parameter.device_mesh
    return all(placement.is_replicate() or mesh.size(dim) == 1 for dim, placement in enumerate(parameter.placements))


def _guard_between_runs(module: Module) -> list[RemovableHandle]:
    """Register hooks on layers with shards, which serve or explain uses without communication."""
    hooks: list[RemovableHandle] = []
    for layer in {layer: None for layer, _, _ in _sharded_parameters(module)}:
        hooks.append(layer.register_load_state_dict_pre_hook(_load_shards))
        hooks.append(layer.register_state_dict_pre_hook(_refuse_state_dict))
        hooks.append(layer.register_forward_pre_hook(_refuse_forward))
    return hooks


def _load_shards(layer: Module, state: dict[str, Any], prefix: str, *args: Any) -> None:  # noqa: ARG001 - torch's signature
    """Copy this rank's part of whole tensors that ``load_state_dict`` got."""
    for name, parameter in layer.named_parameters(recurse=False):
        whole = state.get(prefix + name)
        if isinstance(parameter, DTensor) and isinstance(whole, Tensor) and whole.shape == parameter.shape:
            if isinstance(whole, DTensor):
                continue
            copy_whole(parameter, whole)
            state[prefix + name] = parameter  # which torch then copies onto itself, or assigns


def _refuse_state_dict(layer: Module, prefix: str, keep_vars: bool) -> None:  # noqa: ARG001 - torch's signature
    raise MisuseError(
        f"the state dict of {prefix.rstrip('.') or type(layer).__name__} cannot be gathered: {_AFTER_THE_RUN}. "
        "Checkpoints of the run, such as those of ModelCheckpoint(save_last=True), have everything, and with "
        'FSDPStrategy(state_dict_type="full") a run leaves whole parameters on each rank'
    )


def _refuse_forward(layer: Module, args: Any) -> None:  # noqa: ARG001 - torch's signature
    raise MisuseError(
        f"{type(layer).__name__} cannot compute: {_AFTER_THE_RUN}. trainer.test and trainer.predict gather them, and "
        'with FSDPStrategy(state_dict_type="full") a run leaves whole parameters on each rank'
    )
