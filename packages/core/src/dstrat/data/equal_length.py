"""Data of unknown length, which ends in all processes at the same batch."""

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

    A process that trained on alone would wait for the others for ever.  Each reads some batches ahead, at first one,
    then up to :data:`MOST_BATCHES_AHEAD`, and all of them train on as many as the one with the fewest has; iterating
    is collective.

    Args:
        loader: Any iterable of batches.
        strategy: By which the processes agree.
    """

    def __init__(self, loader: Any, strategy: Strategy) -> None:
        self.loader = loader
        self._strategy = strategy
        self._has_told = False

    def set_epoch(self, epoch: int) -> None:
        """Tell the loader's samplers which epoch comes."""
        set_epoch(self.loader, epoch)

    def __len__(self) -> int:
        """Return the number of batches that the loader announces.

        Raises:
            TypeError: It has no length.
        """
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        iterator, wanted = iter(self.loader), 1
        while True:
            read = deque(itertools.islice(iterator, wanted))
            agreed = self._fewest(len(read))
            if len(read) > agreed:
                self._tell()
            for _ in range(agreed):
                yield read.popleft()  # so that a batch is not kept for longer than it is used
            if agreed < wanted:
                return
            wanted = min(2 * wanted, MOST_BATCHES_AHEAD)

    def _fewest(self, count: int) -> int:
        return int(self._strategy.reduce(torch.tensor(count, device=self._strategy.root_device), reduce_op="min"))

    def _tell(self) -> None:
        if not self._has_told:
            self._has_told = True
            _log.warning(
                "rank %d has more training batches than another process: each epoch ends with the shortest",
                self._strategy.global_rank,
            )


# One number of training batches for all processes.


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
