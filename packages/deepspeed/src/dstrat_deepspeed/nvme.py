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

_PREFIX, _MARK = "dstrat-", "in-use"
_IN_MEMORY, _ONLY_IN_FILE = "AVAILABLE", "NOT_AVAILABLE"


@contextmanager
def folder_in(path: str) -> Iterator[str]:
    """Make a folder for the files of one rank in one run, in a ``with`` block; it is removed with them.

    DeepSpeed removes nothing, and runs that share a folder would write each other's files.  Folders of processes that
    were killed are removed too.
    """
    for mark_path in Path(path).glob(f"{_PREFIX}*/{_MARK}"):
        with suppress(OSError), mark_path.open("w") as file:  # a process holds the lock, or has removed the folder
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(mark_path.parent, ignore_errors=True)
    folder = tempfile.mkdtemp(prefix=_PREFIX, dir=path)
    with Path(f"{folder}.{_MARK}").open("w") as mark:
        fcntl.flock(mark, fcntl.LOCK_EX)  # as long as this process lives
        Path(mark.name).rename(Path(folder) / _MARK)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def mapped(path: str, numel: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor whose memory is a file's: nothing is read before it is used, and writing changes the file.

    DeepSpeed reads and writes the file past the cache of pages, which the operating system keeps consistent with that.
    """
    return torch.from_file(path, shared=True, size=numel, dtype=dtype)


# Parameters


def shard_elements(parameter: Any) -> Tensor:
    """Return the elements of a parameter of stage 3 that this rank holds, flat: in memory, or in their file."""
    elements: Tensor = parameter.ds_tensor.detach()
    if _has_file(parameter):
        release_unused([parameter])
        if parameter.ds_tensor.status.name != _IN_MEMORY:
            path = parameter.nvme_swapper.get_path(parameter, must_exist=True)
            return mapped(path, parameter.ds_tensor.ds_numel, parameter.dtype)
    return elements.view(-1)


def release_unused(parameters: Iterable[Any]) -> None:
    """Release elements that were read ahead for a backward pass that did not come.

    They would take the buffers that others need, and an update would reach them alone and not their file.
    """
    for parameter in parameters:
        if not _has_file(parameter) or parameter.ds_status.name != _ONLY_IN_FILE:
            continue
        if parameter.ds_tensor.status.name != _ONLY_IN_FILE:
            release_elements(parameter)


def release_elements(parameter: Any) -> None:
    """Release elements that are in their file too."""
    if _has_file(parameter):
        parameter.nvme_swapper.synchronize_reads()
        parameter.nvme_swapper.remove_partition_and_release_buffers([parameter])


def _has_file(parameter: Any) -> bool:
    location = getattr(getattr(parameter, "ds_tensor", None), "final_location", None)
    return getattr(location, "value", location) == "nvme"


def parameters_in_files(module: Module) -> list[Any]:
    """Return the parameters of a module that are in files."""
    return [parameter for parameter in module.parameters() if _has_file(parameter)]


def read_once(module: Module) -> None:
    """Keep DeepSpeed from reading a parameter twice at a time, for its forward pass and the backward pass after it."""
    for swapper in swappers_of(module):
        if "swap_in" not in vars(swapper):
            swapper.swap_in = partial(_swap_in_once, swapper.swap_in)


def _swap_in_once(swap_in: Callable[..., None], params: list[Any], **options: Any) -> None:
    swap_in(list({id(parameter): parameter for parameter in params}.values()), **options)


def swappers_of(module: Module) -> list[Any]:
    """Return DeepSpeed's readers and writers of the parameters of a module, where these are in files."""
    swappers = (getattr(parameter, "nvme_swapper", None) for parameter in module.parameters())
    return list({id(swapper): swapper for swapper in swappers if swapper is not None}.values())


def free_buffers(swappers: Iterable[Any]) -> None:
    """Free the page-locked memory through which parameters were read; no parameter may need it any more."""
    # DeepSpeed keeps it until the process ends.
    for swapper in swappers:
        if swapper.pending_reads:
            swapper.aio_read_handle.wait()
        if swapper.pending_writes:
            swapper.aio_write_handle.wait()
        for buffer in (swapper.buffers, swapper.partitioned_swap_buffer):
            if buffer is not None:
                swapper.aio_read_handle.free_cpu_locked_tensor(buffer)


def free_state_buffers(optimizer: Any) -> None:
    """Free the page-locked memory through which the optimizer's state was read."""
    swapper = getattr(optimizer, "optimizer_swapper", None)
    if swapper is not None:
        manager = swapper.swap_buffer_manager
        for buffer in manager.all_buffers:
            manager.aio_handle.free_cpu_locked_tensor(buffer)
        manager.all_buffers = []


# Optimizer


class GroupInFiles:
    """The weights of one of the optimizer's groups and their state, each tensor in a file.

    Args:
        swapper: DeepSpeed's, which reads them for a step and writes them after it.
        tensor: The optimizer's stand-in for the weights; empty between two steps.
    """

    def __init__(self, swapper: Any, tensor: Tensor) -> None:
        self._swapper = swapper
        self._tensor = tensor
        self._info = swapper.swap_params_info[swapper.parameter_id(tensor)]

    @property
    def weights(self) -> Tensor:
        """All elements, in their file."""
        return self._mapped(self._info.tensors[0].swap_path)

    def state(self, optimizer: Optimizer) -> dict[str, Any]:
        """Return the state, with tensors in their files."""
        internals.note_new_state(self._swapper, self._tensor)
        paths = {id(entry.compute_tensor): entry.swap_path for entry in self._info.tensors}
        state = optimizer.state.get(self._tensor, {})
        return {key: self._mapped(paths[id(value)]) if id(value) in paths else value for key, value in state.items()}

    def buffer(self, key: str, value: float) -> Tensor:
        """Make the file of a tensor of the state, with one value everywhere; return its memory."""
        path = os.path.join(self._swapper.swap_folder, f"{self._file_id(key)}.tensor.swp")  # noqa: PTH118 - as DeepSpeed
        return self._mapped(path).fill_(value)

    def set_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        """Take a state whose tensors are in the files that :meth:`state` or :meth:`buffer` has mapped."""
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

    def _mapped(self, path: str) -> Tensor:
        numel = self._info.numel()
        return mapped(path, internals.aligned_elements(self._swapper, numel), self._info.dtype())[:numel]


def group_in_files(optimizer: Any, number: int) -> GroupInFiles | None:
    """Return the files of one of stage 3's groups of parameters; None where it is in memory."""
    if not internals.is_in_files(optimizer, number):
        return None
    return GroupInFiles(optimizer.optimizer_swapper, optimizer.fp32_partitioned_groups_flat[number])
