"""The mesh of processes over which a module is sharded."""

from __future__ import annotations

import math
import warnings
from typing import TYPE_CHECKING, Any

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dstrat.errors import ConflictError, RequestError
from dstrat.parallel.internals import new_connections
from dstrat.parallel.process_group import wait_for_all_ranks
from dstrat_fsdp import internals

if TYPE_CHECKING:
    from collections.abc import Sequence
    from datetime import timedelta

    from dstrat_fsdp.options import ShardingName

REPLICATE, SHARD = "replicate", "shard"
DATA_PARALLEL, TENSOR_PARALLEL = "data_parallel", "tensor_parallel"


def checked_mesh(value: Any) -> DeviceMesh | tuple[int, ...] | None:
    """Return a mesh, or its shape as a tuple.

    Raises:
        RequestError: The value is neither a mesh nor the shape of one.
    """
    if value is None or isinstance(value, DeviceMesh):
        return value
    if isinstance(value, tuple | list) and value and all(type(size) is int and size > 0 for size in value):
        return tuple(value)
    raise RequestError(f"device_mesh {value!r} is not a tuple of positive numbers, such as (2, 4), or a DeviceMesh")


def sharding_mesh_shape(
    sharding: ShardingName | None, device_mesh: DeviceMesh | Sequence[int] | None, *, world_size: int, per_machine: int
) -> tuple[int, ...]:
    """Return the shape of the mesh: the shards, or the replicas and the shards of each.

    Args:
        sharding: The sharding strategy; None for that of the mesh.
        device_mesh: The user's mesh, or its shape.
        world_size: Number of processes of the job.
        per_machine: Number of processes of this machine.

    Raises:
        ConflictError: The mesh is not that of the sharding strategy.
        RequestError: The mesh has another number of processes than the job.
    """
    if device_mesh is None:
        if sharding == "HYBRID_SHARD":
            return (world_size // per_machine, per_machine)
        return (world_size, 1) if sharding == "NO_SHARD" else (world_size,)
    shape = tuple(device_mesh.shape if isinstance(device_mesh, DeviceMesh) else device_mesh)
    if math.prod(shape) != world_size:
        raise RequestError(
            f"device_mesh {shape} has {math.prod(shape)} processes, and the job has {world_size}: "
            "their number must be the same"
        )
    if len(shape) > 2:
        raise RequestError(f"device_mesh {shape} has {len(shape)} dimensions: give (shards,) or (replicas, shards)")
    dimensions = {"NO_SHARD": 0, "HYBRID_SHARD": 2, None: len(shape)}.get(sharding, 1)
    if len(shape) != dimensions:
        raise ConflictError(
            f"sharding_strategy {sharding!r} does not fit device_mesh {shape}: "
            "HYBRID_SHARD takes (replicas, shards), NO_SHARD no mesh, every other one (shards,)"
        )
    return shape


def parallel_sizes(data: int | str, tensor: int | str, *, world_size: int, per_machine: int) -> tuple[int, int]:
    """Return the number of groups that read different data, and the number of processes in each.

    Args:
        data: Number of groups; "auto" follows from the other.
        tensor: Number of processes in a group; "auto" follows from the other, or is a machine's if both are "auto".
        world_size: Number of processes of the job.
        per_machine: Number of processes of this machine.

    Raises:
        RequestError: Their product is not the number of processes.
    """
    for name, size in (("data_parallel_size", data), ("tensor_parallel_size", tensor)):
        if size != "auto" and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise RequestError(f"{name} {size!r} is not 'auto' or a positive number")
    if data == "auto":
        tensor_size = per_machine if tensor == "auto" else int(tensor)
        data_size = max(1, world_size // tensor_size)
    else:
        data_size = int(data)
        tensor_size = max(1, world_size // data_size) if tensor == "auto" else int(tensor)
    if data_size * tensor_size != world_size:
        raise RequestError(
            f"data_parallel_size {data!r} and tensor_parallel_size {tensor!r} do not fit {world_size} processes: "
            "their product must be that number"
        )
    return data_size, tensor_size


def open_mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...], timeout: timedelta) -> DeviceMesh:
    """Open the groups of processes of a mesh; collective.

    Args:
        device_type: Type of the processes' devices.
        shape: Number of processes along each dimension.
        names: Names of the dimensions.
        timeout: How long a collective waits for the other ranks; torch's groups have its default otherwise.

    Raises:
        LaunchError: A rank did not open its groups in time; the message names it.
    """
    internals.drop_cached_results()  # of operations after the end of an earlier mesh
    with new_connections():
        mesh = init_device_mesh(device_type, shape, mesh_dim_names=names)
    with warnings.catch_warnings():
        # Groups of other backends than NCCL and gloo keep the timeout that they opened with.
        warnings.filterwarnings("ignore", message="Set timeout is now only supported", category=UserWarning)
        for dimension in range(len(shape)):
            internals.set_timeout(mesh.get_group(dimension), timeout)
    wait_for_all_ranks("open the device mesh")  # Gloo fails in a rank that still connects when another one closes
    return mesh
