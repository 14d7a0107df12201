"""Iterable dataset that is sharded by process and worker."""

from __future__ import annotations

import copy
import math
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, get_worker_info

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from typing_extensions import Self


class ShardedIterableDataset(IterableDataset[Any]):
    """An iterable dataset that dstrat divides between processes and between the workers of their loaders.

    torch gives all samples of an iterable dataset to every worker of every process.  This one reads another that
    does so, and keeps its part: ``DataLoader(ShardedIterableDataset(stream), batch_size=32, num_workers=4)``.  In
    training all processes get equally many samples, those that lack one at the end repeat an early one, and the
    batches of one step hold the same samples for any number of workers.  In evaluation each sample is read once, and
    predictions are in the order of the stream.

    The stream has to yield the same samples in the same order wherever it is read, and must not divide itself by
    process or worker, or samples are lost.  Each worker reads all of it and drops what others keep: where reading is
    expensive, let the stream divide itself, by ``trainer.global_rank`` and ``torch.utils.data.get_worker_info``.

    Args:
        dataset: What yields all samples.
    """

    def __init__(self, dataset: Iterable[Any]) -> None:
        self.dataset = dataset
        self._rank, self._num_replicas = 0, 1
        self._batch_size = 1
        self._pads = False

    def divided(self, *, rank: int, num_replicas: int, batch_size: int | None, pads: bool) -> Self:
        """Return the shard of a process.

        Args:
            rank: Rank of the process.
            num_replicas: Number of processes.
            batch_size: Samples in a batch of its loader; None where the stream yields whole batches.
            pads: Whether all processes get equally many samples, for training, rather than each sample once.
        """
        divided = copy.copy(self)
        divided._rank, divided._num_replicas = rank, num_replicas  # noqa: SLF001 - of the same class
        divided._batch_size, divided._pads = batch_size or 1, pads  # noqa: SLF001 - likewise
        return divided

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the dataset, if it has ``set_epoch``."""
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(epoch)

    def __len__(self) -> int:
        """Return the number of samples of this process.

        Raises:
            TypeError: The dataset has no length.
        """
        length = len(self.dataset)  # type: ignore[arg-type]  # a TypeError is what this is for
        if self._pads:
            return math.ceil(length / self._num_replicas)
        size, blocks = self._batch_size, math.ceil(length / self._batch_size)
        # Every n-th batch; the last one of all may be incomplete, and belongs to one process.
        mine = range(self._rank, blocks, self._num_replicas)
        cut = size * blocks - length if mine and mine[-1] == blocks - 1 else 0
        return len(mine) * size - cut

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, num_workers = (0, 1) if info is None else (info.id, info.num_workers)
        return self._evenly(worker, num_workers) if self._pads else self._once(worker, num_workers)

    def _once(self, worker: int, num_workers: int) -> Iterator[Any]:
        """Yield every n-th batch, by which predictions of all processes can be put in order."""
        # The workers of a process have its batches by turns, as a DataLoader reads from them by turns.
        for index, sample in enumerate(self.dataset):
            turn, rank = divmod(index // self._batch_size, self._num_replicas)
            if rank == self._rank and turn % num_workers == worker:
                yield sample

    def _evenly(self, worker: int, num_workers: int) -> Iterator[Any]:
        """Yield every n-th sample of every m-th step, where a step has a batch for each process."""
        num_replicas, step_size = self._num_replicas, self._batch_size * self._num_replicas
        count, spare = 0, None
        for index, sample in enumerate(self.dataset):
            count = index + 1
            if index <= self._rank:
                spare = sample  # this rank's first; of a shorter stream, its last
            if index // step_size % num_workers == worker and index % num_replicas == self._rank:
                yield sample
        # The last step may lack a sample for this process, which the worker of that step pads by an early one.
        in_last_worker = (count - 1) // step_size % num_workers == worker
        if in_last_worker and 0 < count % num_replicas <= self._rank:
            yield spare
