"""One number of training batches for all processes."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from dstrat.interfaces.strategy import Strategy

_log = logging.getLogger(__name__)


def agreed_length(strategy: Strategy, num_batches: int | None) -> int | None:
    """Return the number of batches that every process has, as none may train alone; collective.

    Args:
        strategy: Whose processes agree.
        num_batches: Number of batches in this process, None where it is unknown.

    Returns:
        The smallest number, which is told where it is not everyone's; None where it is unknown in all of them.

    Raises:
        MisuseError: It is unknown in some.
    """
    if strategy.world_size == 1:
        return num_batches
    mine = torch.tensor(-1 if num_batches is None else num_batches, device=strategy.root_device)
    lengths = strategy.all_gather(mine).flatten().tolist()
    if len(set(lengths)) == 1:
        return num_batches
    described = ", ".join(f"{'unknown' if n < 0 else n} on rank {rank}" for rank, n in enumerate(lengths))
    if min(lengths) < 0:
        raise MisuseError(f"the training loaders differ in their number of batches: {described}; give each a length")
    if strategy.is_global_zero:
        _log.warning("the training loaders differ in their number of batches: %s; the smallest is taken", described)
    return int(min(lengths))
