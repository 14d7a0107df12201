"""The shards that a run leaves in a module, so that the next run can go on with them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError
from dstrat_fsdp.slices import copy_whole, whole_of, with_local

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module
    from torch.utils.hooks import RemovableHandle

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
