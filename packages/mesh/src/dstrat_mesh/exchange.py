"""All-to-all of rows, with gradients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor
    from torch.distributed import ProcessGroup


def exchange_rows(rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
    """Return the rows that the ranks of a group send to this one, in their order; collective.

    Args:
        rows: The rows that this rank sends, those for the first rank first.
        sent: Number of rows for each rank.
        received: Number of rows from each rank.
        group: The ranks.
    """
    exchanged: Tensor = _RowExchange.apply(rows, sent, received, group)  # type: ignore[no-untyped-call]  # torch leaves it so
    return exchanged


class _RowExchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: Sequence[int], received: Sequence[int], group: ProcessGroup) -> Tensor:
        ctx.inverse = received, sent, group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), list(received), list(sent), group=group)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return exchange_rows(gradient, *ctx.inverse), None, None, None
