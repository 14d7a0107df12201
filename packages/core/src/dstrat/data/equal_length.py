"""Loaders of unknown length that end at the same batch in all processes."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

import torch

from dstrat.data.samplers import set_epoch
from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.interfaces.strategy import Strategy


MOST_BATCHES_AHEAD = 8

_log = logging.getLogger(__name__)


class ShortestLoader:
    """A training loader that ends for all processes when the first of them has no more batches.

    A process with an extra batch would wait for ever in its collectives.  Each process reads batches ahead, at first
    one, then up to :data:`MOST_BATCHES_AHEAD`, and all train on the smallest number that any of them read.  Iterating
    is collective.

    Args:
        loader: Any iterable of batches.
        strategy: Reduces the number of batches over the processes.
    """

    def __init__(self, loader: Any, strategy: Strategy) -> None:
        self.loader = loader
        self._strategy = strategy
        self._has_warned = False

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the loader's samplers."""
        set_epoch(self.loader, epoch)

    def __len__(self) -> int:
        """Return the number of batches that the loader announces.

        Raises:
            TypeError: It has no length.
        """
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        # One at first, so that training begins early; then more, since each agreement is a wait for all processes.
        iterator, num_requested = iter(self.loader), 1
        while True:
            read = deque(itertools.islice(iterator, num_requested))
            count = torch.tensor(len(read), device=self._strategy.root_device)
            agreed = int(self._strategy.reduce(count, reduce_op="min"))
            if len(read) > agreed:
                self._warn()
            for _ in range(agreed):
                yield read.popleft()  # so that a batch is not kept for longer than it is used
            if agreed < num_requested:
                return
            num_requested = min(2 * num_requested, MOST_BATCHES_AHEAD)

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            _log.warning(
                "rank %d has more training batches than another process: each epoch ends with the shortest",
                self._strategy.global_rank,
            )


# Agreement on the number of training batches


def agreed_length(strategy: Strategy, num_batches: int | None) -> int | None:
    """Return the smallest number of batches of all processes; collective.

    Args:
        strategy: Gathers the numbers.
        num_batches: Number of batches in this process, None where it is unknown.

    Returns:
        The smallest number, with a warning where the numbers differ; None where all are unknown.

    Raises:
        MisuseError: The number is known in some processes only.
    """
    if strategy.world_size == 1:
        return num_batches
    mine = torch.tensor(-1 if num_batches is None else num_batches, device=strategy.root_device)
    lengths = strategy.gather_from_processes(mine).flatten().tolist()
    if len(set(lengths)) == 1:
        return num_batches
    described = ", ".join(f"{'unknown' if n < 0 else n} on rank {rank}" for rank, n in enumerate(lengths))
    if min(lengths) < 0:
        raise MisuseError(f"the training loaders differ in their number of batches: {described}; give each a length")
    if strategy.is_global_zero:
        _log.warning("the training loaders differ in their number of batches: %s; the smallest is taken", described)
    return int(min(lengths))
