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
    """A part of a template whose tensors a checkpoint may lack, or have in another dtype, which is converted."""


class CheckpointIO(ABC):
    """How a checkpoint reaches storage and comes back.

    The smallest complete subclass::

        class JsonCheckpointIO(CheckpointIO):
            def save_checkpoint(self, checkpoint, path):
                Path(path).write_text(json.dumps(checkpoint))

            def load_checkpoint(self, path):
                return json.loads(Path(path).read_text())

            def remove_checkpoint(self, path):
                Path(path).unlink()

    Attributes:
        is_collective: Whether every process saves, each its part of sharded tensors; otherwise global rank 0 alone
            does, and gets whole tensors.
    """

    is_collective: bool = False

    @classmethod
    def recognizes(cls, path: str | Path) -> bool:  # noqa: ARG003 - most read only what they have written
        """Return whether a path has a checkpoint of another program, which :meth:`load_checkpoint` converts to ours."""
        return False

    @abstractmethod
    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        """Write the checkpoint.

        Raises:
            CheckpointError: It cannot be written.
        """

    @abstractmethod
    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Read a checkpoint, its tensors on the CPU.

        Raises:
            CheckpointError: It is missing, damaged or refused.
        """

    def load_into(self, path: str | Path, template: Mapping[str, Any]) -> dict[str, Any]:  # noqa: ARG002 - see below
        """Read a checkpoint into the tensors of a template, which may be sharded, as far as it has them.

        Only one that is collective can: others return whole tensors, as :meth:`load_checkpoint` does.
        """
        return self.load_checkpoint(path)

    def load_rank(self, path: str | Path, rank: int) -> dict[str, Any] | None:  # noqa: ARG002 - see below
        """Return what one of the processes that saved had under ``"per_rank"``; None where it is not kept for others.

        Only one that is collective can: others get what belongs to single processes as a part of the checkpoint.

        Raises:
            CheckpointError: It is damaged, or was saved by fewer processes.
        """
        return None

    def remove_checkpoint(self, path: str | Path) -> None:
        """Remove a checkpoint file, so that only the best ones are kept."""
        Path(path).unlink(missing_ok=True)

    def teardown(self) -> None:
        """Finish what is still being written."""


# A run of a tensor's elements, which is what backends that shard flattened parameters keep of each.


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class FlatShard:
    """The elements of a tensor that this process holds: some that follow each other, row by row.

    It stands in a checkpoint, or in the template of one, where a whole tensor would.  Each element is held by one
    process; one that holds none has an empty shard.  The same object under two names is one tensor, as tied weights
    are.

    Attributes:
        local: The elements, contiguous and of one dimension; a checkpoint is loaded into this memory.
        start: Position of the first of them among all elements of the tensor.
        shape: Of the whole tensor.
    """

    local: Tensor
    start: int
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.local.dtype

    def taken_from(self, tensor: Tensor) -> Tensor:
        """Return the elements of this shard out of a whole tensor of the same shape, flat, as a view if possible."""
        return tensor.reshape(-1)[self.start : self.start + self.local.numel()]
