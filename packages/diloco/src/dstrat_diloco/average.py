"""Means of tensors over the groups, in flight: full precision, or compressed to 16 or 8 bits."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from dstrat.parallel.collectives import broadcast_tensors, wait_for_collective

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dstrat_diloco.groups import RankGroups

DeltaDtype = Literal["bfloat16", "int8"]
"""Dtype in which deltas are sent."""

_BLOCK = 1024  # values that share a scale in 8 bits: 4 bytes more for 1024
_BUCKET = 2**25  # elements that are averaged at a time where nothing computes meanwhile


class GroupAverage:
    """The mean of a tensor over the groups, which is communicated while others compute.

    Ranks of a group that have the same tensor divide it, so that each sends a part to the other groups only.
    Compressed, each peer adds a part of the values in float32, and sends their mean; so a value is rounded twice, and
    all groups get the same bits.

    Args:
        tensor: Any number of values, of the same number on all peers; its memory is used.
        groups: The groups.
        is_shared: Whether all ranks of a group have the same tensor.
        dtype: Dtype in which the values are sent; None for their own.
        keeps_equal: Whether values that are the same in all groups stay so to the bit, also at the end of their range.
            They are sent as differences from those of the first group then, without a dtype.
    """

    def __init__(
        self,
        tensor: Tensor,
        groups: RankGroups,
        *,
        is_shared: bool,
        dtype: DeltaDtype | None = None,
        keeps_equal: bool = False,
    ) -> None:
        self._groups, self._dtype = groups, dtype
        self._shape, self._dtype_of_mean = tensor.shape, tensor.dtype
        self._num_pieces = groups.division.size if is_shared else 1
        num_peers = groups.division.num_groups
        flat = tensor.reshape(-1)
        multiple = self._num_pieces * (1 if dtype is None else num_peers * (_BLOCK if dtype == "int8" else 1))
        padded = torch.nn.functional.pad(flat, (0, -flat.numel() % multiple))
        piece = padded.view(self._num_pieces, -1)[groups.rank if is_shared else 0]
        self._mean: Tensor | None = None
        self._piece: Tensor | None = None  # a sum in place, or what is not sent
        self._reference: Tensor | None = None  # values of the first group
        self._received: Tensor | None = None
        self._gathered: list[Tensor] = []
        self._work: Any = None
        if num_peers == 1 or not flat.numel():
            self._piece = piece
        elif dtype is None:
            if keeps_equal:
                self._reference = piece.clone()
                broadcast_tensors([self._reference], groups.peers)
                # Not a difference of infinities, which is no number.
                piece = (piece - self._reference).masked_fill_(piece == self._reference, 0)
            self._piece = piece
            self._work = dist.all_reduce(piece, group=groups.peers, async_op=True)
        else:
            payload = _compress(piece.view(num_peers, -1), dtype)
            self._received = torch.empty_like(payload)
            self._work = dist.all_to_all_single(self._received, payload, group=groups.peers, async_op=True)

    def advance(self) -> None:
        """Begin the second half of a compressed mean, if it has not begun; collective."""
        if self._received is None or self._dtype is None:
            return
        wait_for_collective(self._work)
        rows, self._received = self._received, None
        mean = _expand(rows[:1], self._dtype)
        for index in range(1, len(rows)):  # one by one, as all of them in float32 would take the memory of the weights
            mean += _expand(rows[index : index + 1], self._dtype)
        payload = _compress(mean / len(rows), self._dtype)[0]
        self._gathered = [torch.empty_like(payload) for _ in range(len(rows))]
        self._work = dist.all_gather(self._gathered, payload, group=self._groups.peers, async_op=True)

    def wait(self) -> Tensor:
        """Return the mean, of the shape and dtype of the tensor; collective in the first call."""
        if self._mean is not None:
            return self._mean
        self.advance()
        if self._work is not None:
            wait_for_collective(self._work)
            self._work = None
            if self._piece is not None:
                self._piece /= self._groups.division.num_groups
            if self._piece is not None and self._reference is not None:
                self._piece, self._reference = self._piece + self._reference, None
        piece = (self._expanded() if self._piece is None else self._piece).to(self._dtype_of_mean)
        self._piece = None
        if self._num_pieces > 1 and piece.numel():
            pieces = piece.new_empty(self._num_pieces * piece.numel())
            dist.all_gather([*pieces.split(piece.numel())], piece, group=self._groups.group)
            piece = pieces
        self._mean = piece[: self._shape.numel()].view(self._shape)
        return self._mean

    def _expanded(self) -> Tensor:
        """Return the values that the peers have sent, in float32, and free their bytes."""
        assert self._dtype is not None  # noqa: S101 - only compressed values are gathered
        first = _expand(self._gathered[0].unsqueeze(0), self._dtype)[0]
        values = first.new_empty(len(self._gathered) * first.numel())
        for payload, piece in zip(self._gathered, values.split(first.numel()), strict=True):
            piece.copy_(_expand(payload.unsqueeze(0), self._dtype)[0])
        self._gathered = []
        return values


def average(tensors: Sequence[Tensor], groups: RankGroups, *, is_shared: bool) -> list[Tensor]:
    """Return the means of floating-point tensors over the groups, in new memory; collective.

    The mean of equal values is that value.

    Args:
        tensors: Tensors of this rank, of the same sizes on all peers.
        groups: The groups.
        is_shared: Whether all ranks of a group have the same tensors.
    """
    means: dict[int, Tensor] = {}
    for bucket in _buckets(tensors):
        flat = torch.cat([tensors[index].reshape(-1) for index in bucket])
        wide = flat.to(torch.promote_types(flat.dtype, torch.float32))  # sums of 16 bits lose digits
        mean = GroupAverage(wide, groups, is_shared=is_shared, keeps_equal=True).wait().to(flat.dtype)
        pieces = mean.split([tensors[index].numel() for index in bucket])
        for index, piece in zip(bucket, pieces, strict=True):
            means[index] = piece.view(tensors[index].shape)
    return [means[index] for index in range(len(tensors))]


def _buckets(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Return the indices of tensors that are averaged together: of one dtype and device, and not too many elements."""
    buckets: list[list[int]] = []
    for kind in dict.fromkeys((tensor.dtype, tensor.device) for tensor in tensors):
        filled = _BUCKET + 1  # the first tensor begins a bucket
        for index, tensor in enumerate(tensors):
            if (tensor.dtype, tensor.device) == kind:
                if filled + tensor.numel() > _BUCKET:
                    buckets.append([])
                    filled = 0
                buckets[-1].append(index)
                filled += tensor.numel()
    return buckets


# Comparison

_ODD = -7046029254386353131  # 2**64 over the golden ratio, as a signed number: its multiples look random


def find_differing(tensors: Sequence[Tensor], groups: RankGroups, device: torch.device) -> list[bool]:
    """Return for each tensor whether groups differ in it, on any rank; the same on all ranks; collective.

    Args:
        tensors: Tensors of this rank, as many on all ranks.
        groups: The groups.
        device: Device of the communication.
    """
    if not tensors or groups.division.num_groups == 1:
        return [False] * len(tensors)
    digests = torch.stack([digest(tensor).to(device) for tensor in tensors])
    bounds = torch.cat([digests, ~digests])
    dist.all_reduce(bounds, dist.ReduceOp.MAX, group=groups.peers)
    largest, smallest = bounds.chunk(2)
    flags = (largest != ~smallest).int()
    dist.all_reduce(flags, dist.ReduceOp.MAX, group=groups.job)
    return [bool(flag) for flag in flags.tolist()]


@torch.no_grad()
def digest(tensor: Tensor) -> Tensor:
    """Return an integer of the bits of a tensor and their positions, on its device."""
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for piece in tensor.reshape(-1).contiguous().view(integers).split(_BUCKET):
        mixed = torch.arange(1, piece.numel() + 1, device=tensor.device).mul_(_ODD).add_(piece)
        # Squares, as opposite changes of two values, which are common, would cancel out in a sum.
        total = total * _ODD + mixed.square_().sum()
    return total


# Compression


def _compress(rows: Tensor, dtype: DeltaDtype) -> Tensor:
    """Return the bytes of each row of values."""
    if dtype == "bfloat16":
        return rows.to(torch.bfloat16).contiguous().view(torch.uint8)
    blocks = rows.float().view(rows.shape[0], -1, _BLOCK)
    scales = torch.linalg.vector_norm(blocks, torch.inf, dim=-1, keepdim=True) / 127
    # A block of zeros has no scale; one with a value that is not finite stays so, by its scale.
    values = (blocks / scales.masked_fill(scales == 0, 1)).nan_to_num_(0).round_().to(torch.int8)
    return torch.cat([scales.view(torch.uint8).flatten(1), values.view(torch.uint8).flatten(1)], dim=1)


def _expand(rows: Tensor, dtype: DeltaDtype) -> Tensor:
    """Return the values of each row of bytes, in float32."""
    if dtype == "bfloat16":
        return rows.view(torch.bfloat16).float()
    num_blocks = rows.shape[1] // (_BLOCK + 4)
    scales = rows[:, : 4 * num_blocks].contiguous().view(torch.float32)
    values = rows[:, 4 * num_blocks :].contiguous().view(torch.int8)
    return (values.float().view(rows.shape[0], num_blocks, _BLOCK) * scales.unsqueeze(-1)).flatten(1)
