"""Saving in the background: the training goes on as soon as a copy is taken."""

from __future__ import annotations

import copy
import logging
import threading
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from typing_extensions import override

from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import CheckpointIO

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_log = logging.getLogger(__name__)


@runtime_checkable
class StagesCheckpoints(Protocol):
    """A checkpoint io that can take a copy first, and write it later in another thread."""

    def stage(self, checkpoint: dict[str, Any]) -> Any:
        """Return a copy of all that is to be written; collective where saving is."""

    def write(self, staged: Any, path: str | Path) -> None:
        """Write the copy; it is valid until the next call of :meth:`stage`."""


class AsyncCheckpointIO(CheckpointIO):
    """A checkpoint io whose saves return when a copy is taken; the copy is written in a thread.

    At most one save is in flight: the next one waits for it.  When a write fails, the next call of anything here
    raises its error.  Checkpoints that are removed meanwhile go when the write is done, so that the newest complete
    one is never lost.  The process waits for the write before it ends.

    Args:
        checkpoint_io: What writes; None takes portable folders.  One that is a :class:`StagesCheckpoints` takes its own
            copy; for others all tensors are copied to the CPU.
    """

    def __init__(self, checkpoint_io: CheckpointIO | None = None) -> None:
        if checkpoint_io is None:
            from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

            checkpoint_io = PortableCheckpointIO()
        self.checkpoint_io = checkpoint_io
        self._write: _Write | None = None

    @property
    def is_collective(self) -> bool:  # type: ignore[override]  # it is that of another, and never set
        """Whether every process saves."""
        return self.checkpoint_io.is_collective

    @property
    def is_writing(self) -> bool:
        """Whether a save is in flight."""
        return self._write is not None and self._write.is_alive()

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Copy the checkpoint, and write it in the background.

        Raises:
            CheckpointError: The save before failed, or this one cannot be staged.
        """
        self.wait()
        io = self.checkpoint_io
        if isinstance(io, StagesCheckpoints):
            self._write = _Write(io.write, io.stage(checkpoint), path, io.remove_checkpoint)
        else:
            self._write = _Write(io.save_checkpoint, _copied(checkpoint), path, io.remove_checkpoint)
        self._write.start()

    def check(self) -> None:
        """Raise the error of a background write that has failed; does not wait.

        Raises:
            CheckpointError: It failed.
        """
        if self._write is not None and not self._write.is_alive():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            CheckpointError: The write failed.
        """
        write, self._write = self._write, None
        if write is not None:
            write.join()
            write.raise_failure()

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
        if self._write is None or not self._write.remove_after(path):
            self.check()
            self.checkpoint_io.remove_checkpoint(path)

    @override
    def teardown(self) -> None:
        try:
            self.wait()
        finally:
            self.checkpoint_io.teardown()


class _Write(threading.Thread):
    """One save in flight; no daemon, so that the interpreter waits for it."""

    def __init__(self, write: Any, staged: Any, path: str | Path, remove: Any) -> None:
        super().__init__(name=f"writes {path}", daemon=False)
        self._path, self._remove = path, remove
        self._work, self._staged = write, staged
        self._doomed: list[str | Path] = []
        self._failure: Exception | None = None
        self._is_done = False
        self._lock = threading.Lock()

    @override
    def run(self) -> None:
        try:
            self._work(self._staged, self._path)
        except Exception as error:  # noqa: BLE001 - raised in the thread that trains
            self._failure = error
            _log.error("checkpoint %r was not written in the background: %s", str(self._path), error)
        finally:
            self._staged = None
            self._remove_doomed()

    def _remove_doomed(self) -> None:
        with self._lock:
            self._is_done = True
        if self._failure is not None:
            return
        try:
            for path in self._doomed:
                self._remove(path)
        except Exception as error:  # noqa: BLE001 - raised in the thread that trains
            self._failure = error

    def remove_after(self, path: str | Path) -> bool:
        """Remove another checkpoint when this one is written; return False where it is too late for that."""
        with self._lock:
            if not self._is_done:
                self._doomed.append(path)
            return not self._is_done

    def raise_failure(self) -> None:
        if self._failure is not None:
            raise CheckpointError(
                f"checkpoint {str(self._path)!r} was not written in the background: {self._failure}"
            ) from self._failure


def _copied(value: Any) -> Any:
    """Return nested values with all tensors copied to the CPU."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if type(value) is dict:
        return {key: _copied(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_copied(item) for item in value)
    return copy.deepcopy(value)
