"""Gradients of sharded parameters: accumulation, saving, clipping.

Gradients that are accumulated without communication are unsharded.  torch stores them beside the unsharded parameters,
where ``optimizer.zero_grad`` does not reach them.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from dstrat.errors import MisuseError
from dstrat.interfaces.state_dict import canonical_name, canonical_parameters
from dstrat.parallel.shards import local_tensor, with_local
from dstrat_fsdp import internals

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Mapping, Sequence

    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor.placement_types import Placement
    from torch.nn import Module


def pending_gradients(units: Sequence[FSDPModule], module: Module, *, has_shards: bool) -> dict[str, Any]:
    """Return this rank's gradients that are pending for an optimizer step, by name; empty if there are none.

    Args:
        units: The units of the module, none of which is gathered.
        module: The user's module.
        has_shards: Whether reduced gradients may be pending too, as with manual optimization; otherwise a reduced
            gradient remains from the last optimizer step.
    """
    parameters = canonical_parameters(module)
    names = {id(parameter): name for name, parameter in parameters.items()}
    full, placements = {}, {}
    for param in internals.fsdp_params(units):
        gradient = internals.accumulated_gradient(param)
        if gradient is None:
            continue
        name = names[id(param.sharded_param)]
        if isinstance(gradient, DTensor):  # of a tensor-parallel layer: its ranks have shards or summands
            placements[name] = serialize_placements(gradient)
        full[name] = local_tensor(gradient)
    shards = {n: local_tensor(p.grad) for n, p in parameters.items() if p.grad is not None} if has_shards else {}
    gradients = {"whole": full, "placements": placements, "shards": shards}  # keys of checkpoints
    return gradients if full or shards else {}


def restore_gradients(units: Sequence[FSDPModule], module: Module, saved: Mapping[str, Any]) -> None:
    """Restore the gradients that :func:`pending_gradients` returned, for the next backward pass; collective.

    Args:
        units: The units of the module, sharded over the same mesh.
        module: The user's module.
        saved: The gradients; empty if this rank had none.
    """
    # The unsharded parameters that hold gradients are allocated when a unit is first gathered.
    for unit in units:  # outer ones first, which torch requires
        internals.initialize_before_forward(unit)
    for unit in units:
        unit.unshard()
        unit.reshard()
    parameters = canonical_parameters(module)
    params = {id(param.sharded_param): param for param in internals.fsdp_params(units)}
    for name, gradient in saved.get("whole", {}).items():
        param = params[id(parameters[canonical_name(name)])]  # older checkpoints have the names of torch's wrappers
        like = internals.unsharded_parameter(param)
        restored = gradient.to(like.device, internals.accumulation_dtype(param))
        if name in saved["placements"]:
            restored = deserialize_gradient(restored, saved["placements"][name], like)
        internals.set_accumulated_gradient(param, restored)
    for name, gradient in saved.get("shards", {}).items():
        parameter: Any = parameters[canonical_name(name)]
        parameter.grad = with_local(parameter, gradient.to(parameter.device))


def drop_accumulated(units: Sequence[FSDPModule], parameters: Container[int]) -> None:
    """Clear the unsharded gradients of some parameters.

    Args:
        units: The units of the module.
        parameters: The ids of the parameters' shards.
    """
    for param in internals.fsdp_params(units):
        if id(param.sharded_param) in parameters:
            internals.clear_accumulated_gradient(param)


def serialize_placements(gradient: DTensor) -> list[int | str | None]:
    """Return the placements of a gradient as checkpoints have them."""
    return [_serialize(placement) for placement in gradient.placements]


def deserialize_gradient(local: Tensor, described: Sequence[int | str | None], like: Any) -> Tensor:
    """Return the gradient of a ``DTensor`` with described placements, of this rank's shard or summand."""
    return DTensor.from_local(
        local,
        like.device_mesh,
        [_deserialize(one) for one in described],
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def _serialize(placement: Placement) -> int | str | None:
    """Return a placement as checkpoints have it: the sharded dimension, None for replicas, or the reduction."""
    if isinstance(placement, Shard):
        return placement.dim
    return placement.reduce_op if isinstance(placement, Partial) else None


def _deserialize(described: int | str | None) -> Placement:
    if described is None:
        return Replicate()
    return Partial(described) if isinstance(described, str) else Shard(described)


# Clipping of sharded gradients, which may be sharded over different meshes


@torch.no_grad()
def clip_by_norm(
    parameters: Sequence[Tensor],
    largest: float,
    group: dist.ProcessGroup | None = None,
    counted_elsewhere: Container[int] = (),
    device: torch.device | None = None,
) -> Tensor:
    """Scale gradients in place so that their total norm is at most the largest; collective.

    The norm is that of the full gradients, over all meshes, and the same on every rank.

    Args:
        parameters: Parameters whose gradients are clipped; those without a gradient are skipped.
        largest: The largest 2-norm.
        group: The ranks that have other parameters, such as the stages of a pipeline; None if there are none.
        counted_elsewhere: The ids of the parameters that another rank of the group has too, and counts.
        device: The device of gradients, of which this rank may have none while others of the group have some.

    Returns:
        The norm before clipping, a scalar.
    """
    gradients = _gradients(parameters)
    if not gradients and group is None:
        return torch.zeros(())
    counted = _gradients(parameter for parameter in parameters if id(parameter) not in counted_elsewhere)
    norm = total_norm(counted) if counted else torch.zeros((), device=device)
    if group is not None:
        # In the dtype of all parameters, as ranks have gradients of other ones.
        dtypes = (parameter.dtype for parameter in parameters)
        square = norm.to(functools.reduce(torch.promote_types, dtypes, torch.float32)).square()
        dist.all_reduce(square, group=group)
        norm = square.sqrt()
    factor = (largest / (norm + 1e-6)).clamp(max=1.0)  # torch's own formula, so that losses are those of one device
    if gradients:
        internals.scale([_summed_shard(gradient) for gradient in gradients], factor)
    return norm


@torch.no_grad()
def clip_by_value(parameters: Iterable[Tensor], largest: float) -> None:
    """Limit each value of gradients in place.

    Raises:
        MisuseError: A gradient is not reduced yet: ranks have summands, so no value of it is known.
    """
    local = [_summed_shard(gradient) for gradient in _gradients(parameters)]
    if local:
        internals.clamp(local, largest)


def total_norm(gradients: Sequence[Tensor]) -> Tensor:
    """Return the 2-norm of all gradients together, a scalar; collective.

    For each layout, the squares of this rank's shards are summed over the ranks with other shards, in one collective
    per dimension of the mesh.
    """
    by_layout: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        by_layout.setdefault(_layout(gradient), []).append(_summed_shard(gradient))
    squares = []
    for layout, shards in by_layout.items():
        # At least in float32, as a square overflows in float16 from a norm of 256 on, and has 3 digits in bfloat16.
        norms = [norm.to(torch.promote_types(norm.dtype, torch.float32)) for norm in internals.norms(shards)]
        square = torch.linalg.vector_norm(torch.stack(norms)).square()
        for mesh, dimension in layout:
            dist.all_reduce(square, group=mesh.get_group(dimension))
        squares.append(square)
    return torch.stack(squares).sum().sqrt()


def _layout(gradient: Tensor) -> tuple[tuple[DeviceMesh, int], ...]:
    """Return the dimensions of a mesh along which ranks have different shards of a gradient."""
    if not isinstance(gradient, DTensor):
        return ()
    return tuple(
        (gradient.device_mesh, dimension)
        for dimension, placement in enumerate(gradient.placements)
        if not placement.is_replicate()
    )


def _gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    return [parameter.grad for parameter in parameters if parameter.grad is not None]


def _summed_shard(gradient: Tensor) -> Tensor:
    """Return this rank's shard of a gradient, in the same memory."""
    if not isinstance(gradient, DTensor):
        return gradient
    if any(isinstance(placement, Partial) for placement in gradient.placements):
        raise MisuseError(
            "a gradient is not summed over the ranks yet, so that it cannot be clipped: "
            "clip after the last backward pass of an optimizer step"
        )
    return gradient.to_local()
