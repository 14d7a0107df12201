"""The shards that a run leaves in a module, so that the next run can go on with them."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dstrat.errors import MisuseError
from dstrat_fsdp.slices import whole_of, with_local

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed.device_mesh import DeviceMesh
    from torch.nn import Module

_resting: weakref.WeakKeyDictionary[Module, RestingShards] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class RestingShards:
    """Shards of parameters on the CPU, and the mesh that they were made for.

    Attributes:
        shards: This rank's part of each parameter, by layer and name.
        mesh_shape: The shape of the mesh.
        coordinate: Where in it this process was.
        can_go_on: Whether another run can take them: not where layers communicate by themselves.
    """

    shards: dict[tuple[Module, str], Tensor]
    mesh_shape: tuple[int, ...]
    coordinate: tuple[int, ...]
    can_go_on: bool

    def shard(self, layer: Module, name: str) -> Tensor | None:
        """Return this rank's part of a parameter of a layer; None where it was not sharded."""
        return self.shards.get((layer, name))


def put_to_rest(module: Module, mesh: DeviceMesh, *, can_go_on: bool) -> None:
    """Keep the shards of a module on the CPU for its next run.

    Args:
        module: Its parameters are DTensors; nothing of it is gathered.
        mesh: The mesh that they are sharded over.
        can_go_on: Whether another run can take them.
    """
    shards = {}
    for layer, name, parameter in _sharded_parameters(module):
        shards[layer, name] = local = parameter.detach().to_local().cpu()
        setattr(layer, name, nn.Parameter(with_local(parameter, local), parameter.requires_grad))
    if shards:
        _resting[module] = RestingShards(
            shards=shards,
            mesh_shape=tuple(mesh.shape),
            coordinate=tuple(mesh.get_coordinate() or ()),
            can_go_on=can_go_on,
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
