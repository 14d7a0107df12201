"""Private names of torch that several modules use, of torch 2.9 to 2.13, each with the reason."""

from __future__ import annotations

import contextlib
import json
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.utils import _sync_params_and_buffers
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from dstrat.interfaces.batch import tensors_in

if TYPE_CHECKING:
    from torch import Tensor

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
    count = 0
    for group in list(dist.distributed_c10d._world.pg_map):  # there is no public list of groups
        counting: Any = group  # the method is not in torch's stubs
        with contextlib.suppress(RuntimeError):  # the backend does not count
            count += int(counting._get_sequence_number_for_group())  # there is no public number
    return count


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


class CommunicatedBytes(DispatchMode):
    """Counts the bytes of the tensors in calls of torch.distributed's collectives, by this thread.

    Attributes:
        count: The bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.count = 0

    def __torch_dispatch__(  # torch's name
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function.namespace == "c10d":
            self.count += sum(tensor.nbytes for tensor in tensors_in(args))
        return function(*args, **(kwargs or {}))


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
