"""Asynchronous checkpoint io: a save blocks for the copy, and a thread writes it."""

from __future__ import annotations

import copy
import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from typing_extensions import override

from dstrat.checkpoint.portable.payload import host_memory_like, memory_key, wait_for_devices
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.parallel.internals import empty_host_cache

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from dstrat.interfaces.strategy import Strategy

_log = logging.getLogger(__name__)


@runtime_checkable
class StagesCheckpoints(Protocol):
    """A checkpoint io that makes its own copy first, and writes it later in another thread."""

    def stage(self, checkpoint: dict[str, Any]) -> Any:
        """Return a copy of everything that will be written; collective if saving is."""

    def write(self, staged: Any, path: str | Path) -> None:
        """Write a copy, which is valid until the next call of :meth:`stage`."""


class AsyncCheckpointIO(CheckpointIO):
    """A checkpoint io that copies the state, and writes the copy in a thread.

    At most one save is in flight: the next one waits for it.  If a write fails, the next call of any method raises the
    error.  Removals that are requested during a write happen after it.  The process waits for the write before it
    exits.

    Args:
        checkpoint_io: Writes the checkpoints; None is :class:`PortableCheckpointIO`.  A :class:`StagesCheckpoints`
            makes its own copy; for any other all tensors are copied to the CPU.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        if checkpoint_io is None:
            from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

            checkpoint_io = PortableCheckpointIO()
        self.checkpoint_io = checkpoint_io
        self._write: _Write | None = None

    @property
    def is_collective(self) -> bool:  # type: ignore[override]  # a property here, a class attribute in the base
        """Whether every process saves."""
        return self.checkpoint_io.is_collective

    @property
    @override
    def file_io(self) -> CheckpointIO:
        return self.checkpoint_io.file_io

    @property
    def written_path(self) -> str:
        """The path of the latest save; empty without one, or if its end was waited for."""
        return "" if self._write is None else str(self._write.path)

    @property
    def is_writing(self) -> bool:
        """Whether a save is in flight."""
        return self._write is not None and self._write.is_alive()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Copy the checkpoint, and write it in the background.

        Raises:
            CheckpointError: The previous save failed, or this one cannot be staged.
        """
        # One at a time: staging reuses the memory of the save before, and two saves would compete for the disk.
        self.wait()
        io = self.checkpoint_io
        if isinstance(io, StagesCheckpoints):
            self._write = _Write(io.write, io.stage(checkpoint), path, io.remove_checkpoint)
        else:
            copied = _Copies().copy(checkpoint)
            self._write = _Write(io.save_checkpoint, copied, path, io.remove_checkpoint)
        self._write.start()

    def check(self) -> None:
        """Raise the error of a background write that has failed, without waiting for one in flight.

        Raises:
            CheckpointError: The write failed.
        """
        if self._write is not None and not self._write.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait for the write in flight, if there is one.

        Raises:
            CheckpointError: The write failed.
        """
        # Reset first: an error is raised once, not by every later call.
        write, self._write = self._write, None
        if write is not None:
            write.join()
            write.raise_failure()

    def join(self, seconds: float) -> bool:
        """Wait for the write in flight for a limited time, and return whether it has ended; nothing is raised."""
        if self._write is not None:
            self._write.join(seconds)
        return not self.is_writing

    @override
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        self.wait()
        return self.checkpoint_io.load_checkpoint(path)

    @override
    def load_into(self, path: str | Path, template: Mapping[str, Any]) -> dict[str, Any]:
        self.wait()
        return self.checkpoint_io.load_into(path, template)

    @override
    def load_rank(self, path: str | Path, rank: int) -> dict[str, Any] | None:
        self.wait()
        return self.checkpoint_io.load_rank(path, rank)

    @override
    def remove_checkpoint(self, path: str | Path) -> None:
        # During a write the older checkpoint is the newest complete one, so it stays until the write has succeeded.
        if self._write is None or not self._write.remove_after(path):
            self.check()  # raises if the write failed, and the older checkpoint stays
            self.checkpoint_io.remove_checkpoint(path)

    @override
    def teardown(self) -> None:
        try:
            self.wait()
        finally:
            self.checkpoint_io.teardown()
            empty_host_cache()  # of copies of device tensors, which torch would keep locked for itself


_LONGEST_WAIT = 300.0
"""Seconds that a failed rank waits for its write at most."""


def finish_write(strategy: Strategy, error: BaseException, *, logs: bool) -> None:
    """Wait for the write in flight of a failed rank, to be called before its communication closes.

    All ranks write parts of a checkpoint, and the others can complete it only while this one is there.  Without peers,
    or if these are lost, the write ends by itself.

    Args:
        strategy: Of the failed run.
        error: What it failed with.
        logs: Whether to log the wait: of a rank with an error of its own, not of one that has lost it.
    """
    io = strategy.checkpoint_io
    if not isinstance(io, AsyncCheckpointIO) or not io.is_writing:
        return
    # Shorter than the time after which the others take this rank for hanging, which would hide its error.
    limits = [limit.total_seconds() / 2 for limit in (strategy.timeout, strategy.hang_timeout) if limit is not None]
    seconds = min([_LONGEST_WAIT, *limits])
    reason = f"{type(error).__name__}: {error}".splitlines()[0].removesuffix(": ")
    problem = f"rank {strategy.global_rank} ends with {reason}"
    if logs:
        _log.warning("%s; checkpoint %r is being written, and is completed first", problem, io.written_path)
    if not io.join(seconds):
        _log.error(
            "%s; checkpoint %r was not complete %g s later, and is given up: the ones before are untouched",
            problem,
            io.written_path,
            seconds,
        )


class _Write(threading.Thread):
    """A save in flight."""

    def __init__(self, write: Any, staged: Any, path: str | Path, remove: Any) -> None:
        super().__init__(name=f"writes {path}", daemon=False)  # no daemon: the interpreter waits for it at exit
        self.path, self._remove = path, remove
        self._work, self._staged = write, staged
        self._deferred_removals: list[str | Path] = []
        self._failure: Exception | None = None
        self._is_done = False
        self._lock = threading.Lock()

    @override
    def run(self) -> None:
        try:
            self._work(self._staged, self.path)
        except Exception as error:  # noqa: BLE001 - raised in the thread that trains
            self._failure = error
            # Logged at once too: the training may call nothing here for hours, or never again.
            _log.error("checkpoint %r was not written in the background: %s", str(self.path), error)
        finally:
            self._staged = None  # frees the copy, which may be as large as the model
            self._remove_deferred()

    def _remove_deferred(self) -> None:
        with self._lock:  # a removal is deferred before this, or done by its caller after it, but never lost
            self._is_done = True
        if self._failure is not None:  # the older checkpoints are all that is complete
            return
        try:
            for path in self._deferred_removals:
                self._remove(path)
        except Exception as error:  # noqa: BLE001 - raised in the thread that trains
            self._failure = error

    def remove_after(self, path: str | Path) -> bool:
        """Defer the removal of another checkpoint until this one is written; return False if it is already."""
        with self._lock:
            if not self._is_done:
                self._deferred_removals.append(path)
            return not self._is_done

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise CheckpointError(
                f"checkpoint {str(self.path)!r} was not written in the background: {self._failure}"
            ) from self._failure


class _Copies:
    """Copies of the tensors of a checkpoint on the CPU, pinned for those of a device."""

    def __init__(self) -> None:
        self._by_memory: dict[Any, torch.Tensor] = {}
        self._devices: set[torch.device] = set()

    def copy(self, checkpoint: dict[str, Any]) -> Any:
        """Return a deep copy of a checkpoint, with all tensors on the CPU."""
        copied = self._copy(checkpoint)
        wait_for_devices(self._devices)  # once, for all copies that are in flight
        return copied

    def _copy(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._copy_tensor(value)
        if isinstance(value, dict):
            copied = copy.copy(value)  # keeps the class and its attributes: a module's state dict has _metadata
            for key, item in value.items():
                copied[key] = self._copy(item)
            return copied
        if type(value) in (list, tuple):
            return type(value)(map(self._copy, value))
        return copy.deepcopy(value)

    def _copy_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        # One copy of tied weights, as torch.save writes shared memory once.
        is_dense = type(tensor) is torch.Tensor and tensor.layout is torch.strided
        memory = memory_key(tensor) if is_dense else id(tensor)
        if memory not in self._by_memory:
            if is_dense and not tensor.is_cpu:
                target = host_memory_like(tensor)
                self._by_memory[memory] = target.copy_(tensor.detach(), non_blocking=target.is_pinned())
                self._devices.add(tensor.device)
            else:
                self._by_memory[memory] = tensor.detach().to("cpu", copy=True)
        return self._by_memory[memory]
