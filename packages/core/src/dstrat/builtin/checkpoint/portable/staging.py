"""The copy of what is to be written, taken while the training stands still, in memory that is used again."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from dstrat.builtin.checkpoint.portable.layout import BUCKET
from dstrat.builtin.checkpoint.portable.parallel import map_in_threads
from dstrat.builtin.checkpoint.portable.parts import Part
from dstrat.builtin.checkpoint.portable.payload import Payload, as_bytes

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from dstrat.builtin.checkpoint.portable.shard_file import ShardFile


class StagingMemory:
    """Memory of the host for one copy at a time; pinned where the tensors are on an accelerator that gains by it.

    It is kept, because taking memory from the system costs more than copying.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def copy(self, shard: ShardFile) -> ShardFile:
        """Return the same file with its payloads copied; the copies before are gone."""
        devices = {payload.tensor.device for payload in shard.payloads}
        is_pinned = any(device.type == "cuda" for device in devices)
        self._reserve(shard.size, is_pinned=is_pinned)
        copies, moves, reached = [], [], 0
        for payload in shard.payloads:  # in descending size of elements, so each is aligned
            target = self._memory[reached : reached + payload.num_bytes].view(payload.dtype).view(payload.shape)
            reached += payload.num_bytes
            copies.append(Payload(payload.name, Part(tensor=target, starts=payload.starts)))
            moves += list(_moves(payload.tensor, target))
        map_in_threads(_move, moves)
        for device in devices:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        return replace(shard, payloads=copies)

    def release(self) -> None:
        """Give the memory back."""
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _reserve(self, size: int, *, is_pinned: bool) -> None:
        if self._memory.numel() < size or (is_pinned and not self._memory.is_pinned()):
            self.release()
            self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)


def _moves(source: Tensor, target: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the copy in buckets, so that the threads share the large tensors."""
    if not source.is_contiguous() or source.is_conj() or source.is_neg() or not source.is_cpu:
        yield source, target
        return
    one, other = as_bytes(source), as_bytes(target)
    for begin in range(0, one.numel(), BUCKET):
        yield one[begin : begin + BUCKET], other[begin : begin + BUCKET]


def _move(pair: tuple[Tensor, Tensor]) -> None:
    source, target = pair
    with torch.no_grad():
        target.copy_(source, non_blocking=True)
