"""State that DeepSpeed swaps to files, in a folder of each run."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dstrat_deepspeed import internals

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from torch.nn import Module
    from torch.optim import Optimizer

_PREFIX, _LOCK = "dstrat-", "in-use"
_IN_MEMORY, _ONLY_IN_FILE = "AVAILABLE", "NOT_AVAILABLE"


@contextmanager
def run_folder(path: str) -> Iterator[str]:
    """Make a folder for the files of one rank in one run, and remove it at the end of a ``with`` block.

    Stale folders of killed processes are removed too.
    """
    # DeepSpeed removes no files, and two runs in one folder would overwrite each other's.
    for lock_path in Path(path).glob(f"{_PREFIX}*/{_LOCK}"):
        with suppress(OSError), lock_path.open("w") as file:  # another process holds the lock, or removes the folder
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(lock_path.parent, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=path)
    # Locked before it is moved into the folder: in between, another process would take the folder for a stale one.
    with Path(f"{folder}.{_LOCK}").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the system releases it when the process ends for any reason
        Path(lock.name).rename(Path(folder) / _LOCK)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def map_file(path: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor that is memory-mapped to a file, so that writing to the tensor changes the file.

    DeepSpeed uses direct I/O on the same file, with which the operating system keeps the page cache consistent.
    """
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)


# Parameters


def shard_elements(parameter: Any) -> Tensor:
    """Return this rank's elements of a parameter of stage 3 as a flat tensor, in memory or mapped to their file."""
    elements: Tensor = parameter.ds_tensor.detach()
    if has_file(parameter):
        release_unused([parameter])
        if parameter.ds_tensor.status.name != _IN_MEMORY:
            path = parameter.nvme_swapper.get_path(parameter, must_exist=True)
            return map_file(path, parameter.ds_tensor.ds_numel, parameter.dtype)
    return elements.view(-1)


def release_unused(parameters: Iterable[Any]) -> None:
    """Release elements that were prefetched for a backward pass that was not made."""
    # They would occupy the buffers for other parameters, and an update would change them, but not their file.
    for parameter in parameters:
        if not has_file(parameter) or parameter.ds_status.name != _ONLY_IN_FILE:
            continue
        if parameter.ds_tensor.status.name != _ONLY_IN_FILE:
            release_elements(parameter)


def release_elements(parameter: Any) -> None:
    """Release the buffer of elements that are in their file too."""
    if has_file(parameter):
        parameter.nvme_swapper.synchronize_reads()
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])


def has_file(parameter: Any) -> bool:
    """Return whether this rank's elements of a parameter of stage 3 are in a file."""
    location = getattr(getattr(parameter, "ds_tensor", None), "final_location", None)
    return getattr(location, "value", location) == "nvme"


def parameters_in_files(module: Module) -> list[Any]:
    """Return the parameters of a module that are in files."""
    return [parameter for parameter in module.parameters() if has_file(parameter)]


def prevent_double_reads(module: Module) -> None:
    """Prevent DeepSpeed from reading a parameter twice at a time, for the forward and the backward pass."""
    for swapper in swappers_of(module):
        if "swap_in" not in vars(swapper):
            swapper.swap_in = partial(_swap_in_unique, swapper.swap_in)


def _swap_in_unique(swap_in: Callable[..., None], params: list[Any], **options: Any) -> None:
    swap_in(list({id(parameter): parameter for parameter in params}.values()), **options)


def swappers_of(module: Module) -> list[Any]:
    """Return DeepSpeed's swappers of a module's parameters, which exist if these are in files."""
    swappers = (getattr(parameter, "nvme_swapper", None) for parameter in module.parameters())
    return list({id(swapper): swapper for swapper in swappers if swapper is not None}.values())


def free_buffers(swappers: Iterable[Any]) -> None:
    """Free the page-locked buffers of swappers; no parameter may be in them any more."""
    # DeepSpeed never frees them.
    for swapper in swappers:
        if swapper.pending_reads:
            swapper.aio_read_handle.wait()
        if swapper.pending_writes:
            swapper.aio_write_handle.wait()
        for buffer in (swapper.buffers, swapper.partitioned_swap_buffer):
            if buffer is not None:
                swapper.aio_read_handle.free_cpu_locked_tensor(buffer)


def free_state_buffers(optimizer: Any) -> None:
    """Free the page-locked buffers of the optimizer's state."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        manager = swapper.swap_buffer_manager
        for buffer in manager.all_buffers:
            manager.aio_handle.free_cpu_locked_tensor(buffer)
        manager.all_buffers = []


# Optimizer


class GroupInFiles:
    """The weights of one of the optimizer's groups and their state, with each tensor in a file.

    Args:
        swapper: DeepSpeed's, which reads the files for a step and writes them after it.
        tensor: The optimizer's parameter for the group, which is empty between two steps.
    """

    def __init__(self, swapper: Any, tensor: Tensor) -> None:
        self._swapper = swapper
        self._tensor = tensor
        self._info = swapper.swap_params_info[swapper.parameter_id(tensor)]

    @property
    def weights(self) -> Tensor:
        """All elements, mapped to their file."""
        return self._map_file(self._info.tensors[0].swap_path)

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state, with tensors mapped to their files."""
        internals.register_new_state(self._swapper, self._tensor)
        paths = {id(entry.compute_tensor): entry.swap_path for entry in self._info.tensors}
        state = optimizer.state.get(self._tensor, {})
        return {key: self._map_file(paths[id(value)]) if id(value) in paths else value for key, value in state.items()}

    def buffer(self, key: str, value: float) -> Tensor:
        """Make the file of a tensor of the state, filled with a value, and return the mapped tensor."""
        path = os.path.join(self._swapper.swap_folder, f"{self._file_id(key)}.tensor.swp")  # noqa: PTH118 - as DeepSpeed
        return self._map_file(path).fill_(value)

    def set_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Set the state, whose tensors are mapped to the files of :meth:`state` or :meth:`buffer`."""
        entries = {key: self._stand_in(key, value) for key, value in state.items()}
        self._info.tensors = self._info.tensors[:1]
        self._info.has_state_tensors = False
        in_files = [entry for entry in entries.values() if hasattr(entry, "ds_id")]
        if in_files:
            self._info.add_state_tensors(in_files)
        optimizer.state[self._tensor] = entries

    def _stand_in(self, key: str, value: Any) -> Any:
        if not (isinstance(value, Tensor) and value.shape == (self._info.numel(),)):
            return value
        empty: Any = torch.empty(0, dtype=value.dtype)
        empty.ds_id = self._file_id(key)
        return empty

    def _file_id(self, key: str) -> str:
        return f"{key}-{self._info.param_id}"

    def _map_file(self, path: str) -> Tensor:
        numel, block = self._info.numel(), self._swapper.numel_alignment
        return map_file(path, -(-numel // block) * block, self._info.dtype())[
            :numel
        ]  # complete blocks, as DeepSpeed reads


def group_in_files(optimizer: Any, number: int) -> GroupInFiles | None:
    """Return the files of one of stage 3's groups of parameters; None if it is in memory."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    numel = optimizer.fp16_partitioned_groups_flat_numel[number]
    if swapper is None or not swapper.is_swappable_tensor(None, numel=numel):  # small groups stay in memory
        return None
    return GroupInFiles(swapper, optimizer.fp32_partitioned_groups_flat[number])
