"""Attention over sequences that ranks divide: by an exchange of heads, or by a ring of keys and values."""

from __future__ import annotations

import math
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable
from torch.nn import functional

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat_mesh.exchange import exchange_rows

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from torch import Tensor
    from torch.distributed import ProcessGroup

METHODS = {"ulysses": "heads exchanged for sequences", "ring": "keys and values from rank to rank"}

_torch_attention, _torch_multi_head = functional.scaled_dot_product_attention, functional.multi_head_attention_forward
_HEADS, _SEQUENCE = -3, -2  # dimensions of queries, keys and values: (..., heads, sequence, head size)
_QUERIES_AT_ONCE = 1024  # of a ring, which bounds the memory of its scores


def checked_method(name: str) -> str:
    """Return the name of a method of attention.

    Raises:
        RequestError: There is none.
    """
    if name in METHODS:
        return name
    raise RequestError(f"context_parallel={name!r} is not known: choose {' or '.join(map(repr, METHODS))}")


class DividedAttention:
    """Attention to the sequences of all ranks of a group.

    Each rank calls ``scaled_dot_product_attention`` with the queries, keys and values of its own part of the sequences,
    and gets the output of that part.  ``"ulysses"`` exchanges heads for sequences: between two all-to-alls, a rank has
    whole sequences of a share of the heads (Jacobs et al. 2023, https://arxiv.org/abs/2309.14509).  ``"ring"`` sends
    keys and values from rank to rank, and merges the outputs of their blocks (Liu et al. 2023,
    https://arxiv.org/abs/2310.01889).

    Args:
        method: One of :data:`METHODS`.
        group: The ranks, in the order of the parts.

    Attributes:
        num_calls: Number of attentions that were computed.
    """

    def __init__(self, method: str, group: ProcessGroup) -> None:
        self._method, self._group = method, group
        self.num_calls = 0

    @contextmanager
    def replacing(self) -> Iterator[None]:
        """In this context it replaces the function of ``torch.nn.functional``, also in ``nn.MultiheadAttention``.

        Not by a ``TorchFunctionMode``, which torch leaves in the backward pass, where layers may compute again.
        """
        attention, multi_head = functional.scaled_dot_product_attention, functional.multi_head_attention_forward
        is_fast = torch.backends.mha.get_fastpath_enabled()
        functional.scaled_dot_product_attention = self._attend
        functional.multi_head_attention_forward = _multi_head_attention
        torch.backends.mha.set_fastpath_enabled(False)  # which computes attention in one operation
        try:
            yield
        finally:
            functional.scaled_dot_product_attention, functional.multi_head_attention_forward = attention, multi_head
            torch.backends.mha.set_fastpath_enabled(is_fast)

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        self.num_calls += 1
        lengths = {tensor.shape[_SEQUENCE] for tensor in (query, key, value)}
        if query.dim() < 3 or len(lengths) > 1:
            raise MisuseError(
                f"scaled_dot_product_attention got queries of shape {tuple(query.shape)} and keys of shape "
                f"{tuple(key.shape)}, and cp divides self-attention of shape (..., heads, sequence, head size) only"
            )
        if self._method == "ring":
            _check_ring(attn_mask, dropout_p)
            return ring_attention(query, key, value, self._group, is_causal=is_causal, scale=scale)
        size = self._group.size()
        _check_heads(query.shape[_HEADS], key.shape[_HEADS], size)
        query, key, value = (_exchange(tensor, _HEADS, _SEQUENCE, self._group) for tensor in (query, key, value))
        if attn_mask is not None:
            attn_mask = _mask_of_heads(attn_mask, query.shape[_SEQUENCE], self._group)
        output = _torch_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return _exchange(output, _SEQUENCE, _HEADS, self._group)


def _multi_head_attention(*args: Any, need_weights: bool = True, **kwargs: Any) -> Any:
    if need_weights:
        raise MisuseError(
            "nn.MultiheadAttention was called with need_weights=True, so that it computes attention by itself, and cp "
            "divides sequences: call it with need_weights=False"
        )
    return _torch_multi_head(*args, **{**kwargs, "need_weights": False})


# Exchange of heads


def _check_heads(heads: int, key_heads: int, size: int) -> None:
    if heads % size or key_heads % size:
        raise RequestError(
            f"the {size} ranks of cp divide heads, and attention has {heads} of queries and {key_heads} of keys and "
            "values on each rank (after tp): choose sizes that divide both, or context_parallel='ring'"
        )


def _mask_of_heads(mask: Tensor, length: int, group: ProcessGroup) -> Tensor:
    """Return the mask of this rank's heads."""
    if mask.shape[-1] != length or mask.shape[-2] not in (1, length):
        raise MisuseError(
            f"scaled_dot_product_attention got a mask of shape {tuple(mask.shape)}, and with cp a mask is that of "
            f"whole sequences, (..., {length}, {length}): let cut_sequences of the module leave its sources uncut"
        )
    if mask.dim() < 3 or mask.shape[_HEADS] == 1:
        return mask
    return mask.chunk(group.size(), _HEADS)[group.rank()]


def _exchange(tensor: Tensor, divided: int, joined: int, group: ProcessGroup) -> Tensor:
    """Return a tensor of which one dimension is divided over ranks, and the parts of another one are joined."""
    chunks, ones = torch.stack(tensor.chunk(group.size(), divided)), [1] * group.size()
    return torch.cat(exchange_rows(chunks, ones, ones, group).unbind(), joined)


# Ring of keys and values


def _check_ring(mask: Tensor | None, dropout: float) -> None:
    if mask is not None or dropout:
        received = "a mask" if mask is not None else f"dropout_p={dropout}"
        raise ConflictError(
            f"scaled_dot_product_attention got {received}, and context_parallel='ring' attends to all tokens or, with "
            "is_causal, to all earlier ones: choose context_parallel='ulysses', or leave it out"
        )


def ring_attention(
    query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, *, is_causal: bool, scale: float | None = None
) -> Tensor:
    """Return attention to the keys and values of all ranks of a group; collective.

    If it is causal, sequences are cut in twice as many chunks as ranks, and rank r has the chunks r and 2 n - 1 - r, so
    that each rank computes as many scores (as in https://github.com/zhuzilin/ring-flash-attention).

    Args:
        query: This rank's queries, ``(..., heads, sequence, head size)``.
        key: Its keys, with as many heads or a divisor of their number.
        value: Its values, likewise.
        group: The ranks.
        is_causal: Whether tokens attend to earlier ones only.
        scale: Factor of the scores; None for one over the root of the head size.
    """
    # Heads that share a key are one more dimension.
    grouped = query.unflatten(_HEADS, (key.shape[_HEADS], -1))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    pair = key.unsqueeze(_HEADS), value.unsqueeze(_HEADS)
    output: Tensor = _Ring.apply(grouped, *pair, group, is_causal, scale)  # type: ignore[no-untyped-call]  # torch leaves it so
    return output.flatten(_HEADS - 1, _HEADS)


class _Ring(torch.autograd.Function):
    """Ring attention, which computes scores again in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, group: ProcessGroup, is_causal: bool, scale: float
    ) -> Tensor:
        output = query.new_zeros(*query.shape[:-1], value.shape[-1], dtype=_exact(query.dtype))
        log_sum = torch.full_like(output[..., :1], -math.inf)
        pair = torch.cat([key, value], -1)
        for step in range(group.size()):
            transfer = _Transfer(pair, group) if step + 1 < group.size() else None
            keys, values = pair.split([key.shape[-1], value.shape[-1]], -1)
            for rows, columns, mask in _blocks(query, group, step, is_causal):
                scores = _scores(query[rows], keys[columns], mask, scale)
                # Sums of exponentials are merged by their logarithms, which do not overflow.
                of_block = scores.logsumexp(-1, keepdim=True)
                merged = torch.logaddexp(log_sum[rows], of_block)
                added = _matmul((scores - merged).exp(), values[columns])
                output[rows] = output[rows] * (log_sum[rows] - merged).exp() + added
                log_sum[rows] = merged
            if transfer is not None:
                pair = transfer.wait()
        ctx.save_for_backward(query, key, value, output, log_sum)
        ctx.options = group, is_causal, scale
        return output.to(query.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        query, key, value, output, log_sum = ctx.saved_tensors
        group, is_causal, scale = ctx.options
        gradient = gradient.to(output.dtype)
        inner = (gradient * output).sum(-1, keepdim=True)
        of_query = torch.zeros_like(query, dtype=output.dtype)
        pair = torch.cat([key, value], -1)
        of_pair = torch.zeros_like(pair, dtype=output.dtype)  # travels with its pair, and is home after a round
        for step in range(group.size()):
            transfer = _Transfer(pair, group)
            keys, values = pair.split([key.shape[-1], value.shape[-1]], -1)
            of_keys, of_values = of_pair.split([key.shape[-1], value.shape[-1]], -1)
            for rows, columns, mask in _blocks(query, group, step, is_causal):
                weights = (_scores(query[rows], keys[columns], mask, scale) - log_sum[rows]).exp()
                of_values[columns] += _matmul(weights.mT, gradient[rows]).sum(_HEADS, keepdim=True)
                of_scores = weights * (_matmul(gradient[rows], values[columns].mT) - inner[rows]) * scale
                of_query[rows] += _matmul(of_scores, keys[columns])
                of_keys[columns] += _matmul(of_scores.mT, query[rows]).sum(_HEADS, keepdim=True)
            pair, of_pair = transfer.wait(), _Transfer(of_pair, group).wait()
        of_keys, of_values = of_pair.split([key.shape[-1], value.shape[-1]], -1)
        return of_query.to(query.dtype), of_keys.to(key.dtype), of_values.to(value.dtype), None, None, None


def _blocks(query: Tensor, group: ProcessGroup, step: int, is_causal: bool) -> Iterator[tuple[Any, Any, Tensor | None]]:
    """Yield the rows of queries, the columns of keys, and the masks of the blocks of a step that are not empty.

    Args:
        query: The queries of this rank.
        group: The ranks.
        step: Number of ranks that the keys have passed.
        is_causal: Whether tokens attend to earlier ones only.
    """
    rank, length = group.rank(), query.shape[_SEQUENCE]
    source = (rank - step) % group.size()
    # Of another rank's two chunks, both of ours come after the first, or our second one comes after both.
    first_row = length // 2 if is_causal and source > rank else 0
    last_column = length // 2 if is_causal and source < rank else length
    for start in range(first_row, length, _QUERIES_AT_ONCE):
        stop = min(start + _QUERIES_AT_ONCE, length)
        mask, columns = None, last_column
        if is_causal and source == rank:
            columns = stop
            mask = torch.ones(stop - start, columns, dtype=torch.bool, device=query.device).triu(start + 1)
        yield (..., slice(start, stop), slice(None)), (..., slice(0, columns), slice(None)), mask


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    scores = _matmul(query, key.mT) * scale
    return scores if mask is None else scores.masked_fill_(mask, -math.inf)


def _exact(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of sums of values of a dtype: float32 for those of 16 bits."""
    return torch.promote_types(dtype, torch.float32)


def _matmul(matrix: Tensor, other: Tensor) -> Tensor:
    with torch.autocast(matrix.device.type, enabled=False):
        return matrix.to(_exact(matrix.dtype)) @ other.to(_exact(other.dtype))


class _Transfer:
    """A tensor on its way to the next rank of a ring, while that of the previous one comes."""

    def __init__(self, tensor: Tensor, group: ProcessGroup) -> None:
        self._sent = tensor.contiguous()  # in memory until it has arrived
        self._received = torch.empty_like(self._sent)
        rank, size = group.rank(), group.size()
        following, previous = (dist.get_global_rank(group, other % size) for other in (rank + 1, rank - 1))
        self._works: Iterable[Any] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, self._sent, following, group),
                dist.P2POp(dist.irecv, self._received, previous, group),
            ]
        )

    def wait(self) -> Tensor:
        """Return the tensor of the previous rank."""
        for work in self._works:
            work.wait()
        return self._received
