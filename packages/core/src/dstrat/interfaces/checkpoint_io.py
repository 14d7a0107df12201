"""Interface of checkpoint ios: dict in, dict out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch
    from torch import Tensor


class OptionalTensors(dict[str, Any]):
    """Subtree of a template whose tensors a checkpoint may lack, or have in another dtype, which is converted."""


class CheckpointIO(ABC):
    """Writes checkpoints to storage, and reads them.

    A checkpoint is a dict of tensors, numbers, texts and None, in nested dicts, lists and tuples; callbacks of a user
    may add any object.  :meth:`save_checkpoint` and :meth:`load_checkpoint` must be overridden.  The smallest complete
    subclass::

        class MyCheckpointIO(CheckpointIO):
            def save_checkpoint(self, checkpoint, path):
                torch.save(checkpoint, path)

            def load_checkpoint(self, path):
                return torch.load(path, map_location="cpu", weights_only=True)

    Every process reads; global rank 0 alone writes and removes.  No method communicates, unless :attr:`is_collective`
    is True.

    Attributes:
        is_collective: Whether every process calls :meth:`save_checkpoint`, each with its shards (DTensors or
            :class:`FlatShard`); otherwise only global rank 0 calls it, with full tensors.
    """

    is_collective: bool = False

    @property
    def file_io(self) -> CheckpointIO:
        """The checkpoint io in whose format the files are: this one, unless it is a wrapper of another one."""
        return self

    @classmethod
    def recognizes(cls, path: str | Path) -> bool:
        """Return whether a path has a checkpoint of another program, which :meth:`load_checkpoint` converts."""
        return False

    def check_values(self, values: Mapping[str, Any]) -> None:
        """Check that a checkpoint can hold nested values, before a training that saves them later; by default any.

        Raises:
            CheckpointError: It cannot hold one of them.
        """

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write the checkpoint; when this returns, it is complete.

        Args:
            checkpoint: Tensors on any device, which the training changes as soon as this has returned.
            path: A path or a URL.

        Raises:
            CheckpointError: It cannot be written.
        """

    @abstractmethod
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint, its tensors on the CPU; called in every process.

        Raises:
            CheckpointError: It is missing, damaged or refused.
        """

    def load_into(self, path: str | Path, template: Mapping[str, Any]) -> dict[str, Any]:
        """Read a checkpoint into those tensors of a template that it has; called in every process.

        Only collective ones can do this; others return full tensors, as :meth:`load_checkpoint` does.

        Args:
            path: Of the checkpoint.
            template: Nested dicts and lists, whose tensors and shards are overwritten in place, on their devices.
                Below a None no tensor is read.

        Returns:
            The checkpoint, with the template's tensors in it, and in full those that the template lacks.
        """
        return self.load_checkpoint(path)

    def load_rank(self, path: str | Path, rank: int) -> dict[str, Any] | None:
        """Return the state that one of the saving processes had under ``"per_rank"``; None if it is not stored.

        Only collective ones can do this; others have the state of single processes within the checkpoint.

        Raises:
            CheckpointError: It is damaged, or was saved by fewer processes.
        """
        return None

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint, if it exists; called in global rank 0 alone."""
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        """Finish pending writes; called in every process at the end of a run, also after an error."""


# Shards of flattened tensors


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatShard:
    """Contiguous range of a flattened tensor's elements, in row-major order, that this process holds.

    It replaces a full tensor in a checkpoint or its template.  Each element is held by one process, and the shard of a
    process may be empty.  The same object under two names is one tensor, as for tied weights.

    Attributes:
        local: The elements, contiguous and of one dimension; a checkpoint is loaded into this memory.
        start: Index of the first of them among all elements of the tensor.
        shape: Shape of the full tensor.
    """

    local: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the elements."""
        return self.local.dtype

    def taken_from(self, tensor: Tensor) -> Tensor:
        """Return the elements of this shard from a full tensor of the same shape, flat, as a view if possible."""
        return tensor.reshape(-1)[self.start : self.start + self.local.numel()]
