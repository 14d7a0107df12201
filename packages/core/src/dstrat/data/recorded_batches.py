"""Knowing which samples of the dataset a batch holds."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, Sampler

from dstrat.data.division import with_parts

if TYPE_CHECKING:
    from collections.abc import Iterator


class RecordedBatches(Sampler[Any]):
    """The batches of another batch sampler (or the indices of a sampler), kept until they are asked for.

    A loader asks for batches ahead of time and gives them in the same order.

    Args:
        batches: Any sampler or batch sampler.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._pending: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._pending.clear()
        for batch in self._batches:
            self._pending.append(batch)
            yield batch

    def take(self) -> list[Any]:
        """Return the indices in the batch that the loader gave last."""
        batch = self._pending.popleft()
        return list(batch) if isinstance(batch, list | tuple) else [batch]


def record_batches(loader: Any) -> Any:
    """Return a loader that keeps which samples its batches hold; one whose samples have no index as it is."""
    has_indices = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not has_indices or not getattr(loader, "in_order", True):
        return loader
    if loader.batch_sampler is None:
        return with_parts(loader, sampler=RecordedBatches(loader.sampler))
    return with_parts(loader, batch_sampler=RecordedBatches(loader.batch_sampler))


def take_indices(loader: Any) -> list[Any] | None:
    """Return the indices in the dataset of the samples of a loader's batch; None where they are unknown.

    Asked once for each batch, and of a loader that :func:`record_batches` returned.
    """
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if isinstance(sampler, RecordedBatches):
            return sampler.take()
    return None
