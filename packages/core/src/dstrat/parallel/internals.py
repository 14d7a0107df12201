"""Private names of torch that several modules use, of torch 2.9 to 2.13, each with the reason."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_params_and_buffers
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from dstrat.interfaces.batch import tensors_in
from dstrat.interfaces.communication import Collective

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from torch import Tensor

    from dstrat.interfaces.communication import CollectiveKind

_BUCKET = 250 * 2**20  # bytes of one broadcast, as in DistributedDataParallel

# What SyncBatchNorm.convert_sync_batchnorm converts; the public classes are one for each number of dimensions.
BatchNorm = _BatchNorm

# The base of contexts that see each operation of tensors; torch documents it, in a module with a private name.
DispatchMode = TorchDispatchMode


def broadcast_coalesced(tensors: list[Tensor], group: dist.ProcessGroup) -> None:
    """Overwrite tensors by those of the group's first rank, in few messages; collective.

    A public broadcast sends one tensor at a time, which takes long for a module of thousands of parameters.
    """
    _sync_params_and_buffers(group, tensors, _BUCKET, 0)


@contextlib.contextmanager
def new_connections() -> Iterator[None]:
    """Make groups of ranks by connections of their own in a ``with`` block.

    torch splits the connections of a default group that is bound to a device.  With NCCL that ends the process by a
    segmentation fault if its default group was closed and opened before, as between a fit and a test (torch 2.11).
    """
    default: Any = dist.distributed_c10d._get_default_group()
    device, default.bound_device_id = default.bound_device_id, None
    try:
        yield
    finally:
        default.bound_device_id = device


def abort_groups() -> None:
    """End all process groups without waiting for their collectives, if NCCL is among the backends.

    The public ``ProcessGroup.abort`` ends one group; of several, aborts in different orders can block each other
    (https://github.com/pytorch/pytorch/issues/119797), and torch's record of the groups stays.
    """
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)  # experimental: torch may drop it
    if abort is not None and dist.is_initialized() and uses_nccl(dist.get_backend_config()):
        with contextlib.suppress(RuntimeError):  # another backend beside NCCL cannot abort
            abort()


def uses_nccl(backends: str) -> bool:
    """Return whether NCCL is among the backends of a group, such as ``"cpu:gloo,cuda:nccl"``."""
    return any(pair.rpartition(":")[2] == "nccl" for pair in backends.split(","))


def nccl_counts() -> dict[str, tuple[int, int]]:
    """Return the numbers of the collectives that NCCL began last and completed last, by group; empty without NCCL.

    They are those of torch's flight recorder; ``TORCH_FR_BUFFER_SIZE=0`` turns it off.
    """
    dump = getattr(torch._C._distributed_c10d, "_dump_nccl_trace_json", None)  # there is no public one
    if dump is None or not dist.is_initialized():
        return {}
    groups = json.loads(dump(includeCollectives=False)).get("pg_status", {})
    return {
        group: (int(status["last_enqueued_collective"]), int(status["last_completed_collective"]))
        for group, status in groups.items()
    }


def count_collectives() -> int:
    """Return how many collectives this process has begun, in all groups whose backend counts them."""
    return sum(map(number_begun, list(dist.distributed_c10d._world.pg_map)))  # there is no public list of groups


def collectives_of_all_ranks() -> tuple[int, ...]:
    """Return how many collectives this process has begun in each group of all ranks, in the order of their opening.

    Gloo counts messages between two ranks, too, which can be more in one rank than in another.
    """
    size = dist.get_world_size()
    return tuple(number_begun(group) for group in list(dist.distributed_c10d._world.pg_map) if group.size() == size)


def number_begun(group: dist.ProcessGroup) -> int:
    """Return how many collectives, and with some backends messages, this process has begun in a group."""
    counting: Any = group  # the method is not in torch's stubs
    try:
        return int(counting._get_sequence_number_for_group())  # there is no public number
    except RuntimeError:  # a group asks its backend only if that is torch's own
        return sum(_number_begun_by(counting._get_backend(device)) for device in counting._device_types)


def _number_begun_by(backend: Any) -> int:
    try:
        return int(backend._get_sequence_number_for_group())
    except RuntimeError:  # it does not count
        return 0


class RefusedCollectives(DispatchMode):
    """A context in which a collective raises an error before it begins.

    Args:
        error: The error.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self._error = error

    def __torch_dispatch__(  # torch's name
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace in ("c10d", "_c10d_functional"):  # of torch.distributed's functions, and of DTensor
            raise self._error
        return function(*args, **(kwargs or {}))


_KINDS: dict[str, CollectiveKind] = {
    # By the names of torch.distributed's operators, and of those of DTensor, in any of their forms.
    "all_reduce": "all_reduce",
    "allreduce": "all_reduce",
    "all_gather": "all_gather",
    "allgather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "all_to_all": "all_to_all",
    "alltoall": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "broadcast",
    "scatter": "broadcast",
    "send": "send",
}


class RecordedCollectives(DispatchMode):
    """Records the collectives that this thread begins.

    Attributes:
        collectives: The collectives so far, each by itself.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.collectives: list[Collective] = []

    def __torch_dispatch__(  # torch's name
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if any(cls not in (torch.Tensor, torch.nn.Parameter) for cls in types):
            return NotImplemented  # operations of a DTensor call collectives themselves, which are recorded then
        output = function(*args, **(kwargs or {}))
        if function.namespace in ("c10d", "_c10d_functional"):
            name = function._schema.name.partition("::")[2].strip("_")
            kind = next((kind for prefix, kind in _KINDS.items() if name.startswith(prefix)), None)
            group = next(filter(None, map(_group_of, args)), None)
            if kind is not None and group is not None:
                # The full tensor is the largest value: an argument that is scattered, or a result that is gathered.
                size = max(sum(tensor.nbytes for tensor in tensors_in(value)) for value in (*args, output))
                self.collectives.append(Collective(kind=kind, bytes=size, messages=1, ranks=group.size()))
        return output


def _group_of(argument: Any) -> Any:
    """Return the process group that an argument of an operator is or names; None for another argument."""
    if isinstance(argument, torch.ScriptObject):
        with contextlib.suppress(RuntimeError):  # an operation, such as a sum
            return dist.ProcessGroup.unbox(argument)
    if isinstance(argument, str):
        with contextlib.suppress(RuntimeError):  # the name of an operation
            return dist.distributed_c10d._resolve_process_group(argument)  # type: ignore[arg-type]  # a name is a str
    return None


# Operations and storages


def arguments_of(operation: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Any, bool]]:
    """Yield the arguments of a call of torch's operator: name, value, and whether the call changes it in place."""
    for index, argument in enumerate(operation._schema.arguments):
        value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
        yield argument.name, value, argument.alias_info is not None and argument.alias_info.is_write


def storage_key(tensor: Tensor) -> int:
    """Return the identity of a tensor's storage while that exists; torch has no public one."""
    return int(tensor.untyped_storage()._cdata)


def change_count(tensor: Tensor) -> int:
    """Return the number of in-place changes of a tensor; 0 for a tensor of inference mode, which does not count."""
    return 0 if tensor.is_inference() else tensor._version  # torch documents it in its notes on autograd


def has_plain_storage(tensor: Tensor) -> bool:
    """Return whether all elements of a tensor are in one storage, unlike those of nested and wrapped tensors."""
    is_strided = tensor.layout == torch.strided and not tensor.is_nested and not tensor.is_quantized
    return is_strided and not is_traceable_wrapper_subclass(tensor)


# Pinned memory


def empty_host_cache() -> None:
    """Give pinned memory that is free back to the system, since torch 2.12."""
    empty = getattr(torch.accelerator, "empty_host_cache", None)
    accelerator = torch.accelerator.current_accelerator()
    if empty is None or accelerator is None:
        return
    # A device that a package adds may have no such allocator, and torch 2.13 does not look: the process would crash.
    if accelerator.type != torch._C._get_privateuse1_backend_name():  # there is no public name
        empty()


# Schedulers


def nested_schedulers(scheduler: Any) -> list[Any]:
    """Return a scheduler and those in it, which torch's SequentialLR and ChainedScheduler keep by a private name."""
    inner = getattr(scheduler, "_schedulers", ())
    return [scheduler, *(each for one in inner for each in nested_schedulers(one))]
