"""A run of a tensor's elements, which is what backends that shard flattened parameters keep of each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import Tensor


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

    def taken_from(self, whole: Tensor) -> Tensor:
        """Return the elements of this shard out of a whole tensor of the same shape, flat, as a view if possible."""
        return whole.reshape(-1)[self.start : self.start + self.local.numel()]
