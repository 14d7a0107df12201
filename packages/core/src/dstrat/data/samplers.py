"""Samplers that divide the data between processes, and their epochs."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import RandomSampler, Sampler

from dstrat.data.combined_loader import CombinedLoader
from dstrat.data.random_state import drop_workers
from dstrat.data.sharded_dataset import ShardedIterableDataset
from dstrat.errors import RequestError
from dstrat.parallel.internals import change_count

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sized


_log = logging.getLogger(__name__)

Order = Callable[[int, int], Iterable[Any]]
"""Function of an epoch and of the number of earlier readings in it; returns its indices, or batches."""


class RankSampler(Sampler[int]):
    """Every n-th index of an order that all processes share, for training.

    All processes get the same number of indices: where the order does not divide evenly, indices from its start pad
    it, so that no process waits for a batch that another one lacks.

    Its state lets stateful loaders (torchdata's StatefulDataLoader) resume within an epoch.

    Args:
        order: The same in every process.
        length: Number of indices in the order.
        num_replicas: Number of processes.
        rank: Rank of this process.

    Attributes:
        order: As it was given.
        epoch: The epoch whose order comes next.
    """

    def __init__(self, order: Order, *, length: int, num_replicas: int, rank: int) -> None:
        self.order = order
        self._length = length
        self._num_replicas, self._rank = num_replicas, rank
        self.epoch = 0
        self._times_read = self._num_read = self._num_skipped = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next reading."""
        self.epoch = epoch
        self._times_read = self._num_read = self._num_skipped = 0

    def state_dict(self) -> dict[str, int]:
        """Return the position in the latest reading of the epoch; the loop sets the epoch itself."""
        return {"times_read": self._times_read, "num_read": self._num_read}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Make the next reading continue from a saved position."""
        self._times_read = max(0, state["times_read"] - 1)  # that reading begins again, and counts itself
        self._num_skipped = state["num_read"]

    def __len__(self) -> int:
        return math.ceil(self._length / self._num_replicas)

    def __iter__(self) -> Iterator[int]:
        # Drawn as it is read: an order of RandomSampler(num_samples=10**10) fits into no memory.
        order = iter(self.order(self.epoch, self._times_read))
        first = list(itertools.islice(order, self._num_replicas))
        self._times_read += 1  # a loader that is read twice in an epoch (max_size_cycle) gets another order
        # More than once where there are fewer samples than processes.
        padded = itertools.chain(first, order, itertools.cycle(first))
        # Each rank draws the indices of all, so that the sampler's generator is in the same state in all of them, also
        # where a loader is left before its end.
        of_ranks = zip(*[padded] * self._num_replicas, strict=False)
        # A loader that has read everything starts again.
        self._num_read = self._num_skipped if self._num_skipped < len(self) else 0
        self._num_skipped = 0
        for indices in itertools.islice(of_ranks, self._num_read, len(self)):
            self._num_read += 1
            yield indices[self._rank]


class RankBatchSampler(Sampler[Any]):
    """Every n-th batch of another batch sampler, for evaluation: each sample is read once in the whole job.

    Batches are the same ones as on one device, unless :class:`CutBatches` has cut them; processes may differ by one
    batch.

    Args:
        batches: The batches of the whole job, in the same order in every process.
        order: That order.
        num_replicas: Number of processes.
        rank: Rank of this process.

    Attributes:
        batches: As they were given.
        order: As it was given.
    """

    def __init__(self, batches: Any, order: Order, *, num_replicas: int, rank: int) -> None:
        self.batches, self.order = batches, order
        self._num_replicas, self._rank = num_replicas, rank

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next reading, in the sampler below the batches."""
        inner = self.batches
        while inner is not None:
            if hasattr(inner, "set_epoch"):
                inner.set_epoch(epoch)
            inner = getattr(inner, "batches", getattr(inner, "sampler", None))

    def __len__(self) -> int:
        return len(range(self._rank, len(self.batches), self._num_replicas))

    def __iter__(self) -> Iterator[Any]:
        for index, batch in enumerate(self.batches):
            if index % self._num_replicas == self._rank:
                yield batch


class CutBatches(Sampler[Any]):
    """The samples of fewer batches than there are processes, in their order, in a batch for each process.

    Args:
        batches: A batch sampler.
        num_samples: Number of samples in its batches.
        num_replicas: Number of processes; there are as many batches, or one for each sample if these are fewer.

    Attributes:
        batches: As they were given.
    """

    def __init__(self, batches: Any, *, num_samples: int, num_replicas: int) -> None:
        self.batches = batches
        self._num_samples, self._count = num_samples, min(num_replicas, num_samples)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        samples = list(itertools.chain.from_iterable(self.batches))
        ends = [self._num_samples * number // self._count for number in range(self._count + 1)]
        for begin, end in itertools.pairwise(ends):
            yield samples[begin:end]


class RepeatedBatches(Sampler[Any]):
    """The batches of another batch sampler, read again and again up to a number of batches.

    Args:
        batches: A batch sampler that is not empty.
        count: Number of batches.

    Attributes:
        batches: As they were given.
    """

    def __init__(self, batches: Any, count: int) -> None:
        self.batches = batches
        self._count = count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        endless = itertools.chain.from_iterable(itertools.repeat(self.batches))
        return itertools.islice(endless, self._count)


class AgreedSampler(Sampler[Any]):
    """A sampler of an order that all processes share.

    Args:
        order: The same in every process.
        sampler: The sampler, or batch sampler, whose order it is.

    Attributes:
        order: As it was given.
        epoch: The epoch whose order comes next.
    """

    def __init__(self, order: Order, sampler: Sized) -> None:
        self.order, self._sampler = order, sampler
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next reading, also of the sampler, whose length may depend on it."""
        self.epoch = epoch
        samplers: list[Any] = [self._sampler, getattr(self._sampler, "sampler", None)]
        for sampler in samplers:
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.order(self.epoch, 0))


_SEEDS_BETWEEN_READINGS = 1_000_003  # more than there are epochs, and torch takes seeds modulo 2**32


class ShuffledOrder:
    """The shuffled indices of an epoch, from a seed that all processes share.

    Attributes:
        seed: That seed.
    """

    def __init__(self, data_source: Any, seed: int) -> None:
        self._data_source = data_source
        self.seed = seed

    @staticmethod
    def seed_for(sampler_seed: int, epoch: int) -> int:
        """Return the seed by which the first reading of an epoch has the order of torch's sampler with its seed."""
        return (sampler_seed - epoch) % 2**32  # torch's generator on the CPU takes the lower 32 bits

    def __call__(self, epoch: int, times_read: int) -> Iterable[int]:
        seed = self.seed + epoch + times_read * _SEEDS_BETWEEN_READINGS
        generator = torch.Generator().manual_seed(seed % 2**32)
        return RandomSampler(self._data_source, generator=generator)


class SequentialOrder:
    """All indices in their order, in every epoch."""

    def __init__(self, length: int) -> None:
        self._length = length

    def __call__(self, _epoch: int, _times_read: int) -> Iterable[int]:
        return range(self._length)


class BroadcastOrder:
    """The order of a user's own sampler or batch sampler, as rank 0 drew it.

    Args:
        sampler: The sampler or batch sampler.
        broadcast: Returns what rank 0 passes.
        most: Number of items from which on the sampler is taken for one without an end; None is no number.
    """

    def __init__(
        self, sampler: Iterable[Any], broadcast: Callable[[list[Any]], list[Any]], *, most: int | None = None
    ) -> None:
        self.sampler = sampler
        self._broadcast, self._most = broadcast, most

    def __call__(self, epoch: int, _times_read: int) -> Iterable[Any]:
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)
        # Each rank draws, and all use rank 0's: so the sampler's own state and the random numbers go on alike.
        items = list(itertools.islice(self.sampler, self._most))
        if len(items) == self._most:
            raise RequestError(
                f"{type(self.sampler).__name__} has no length, and has given {self._most} batches without an end, "
                "which rank 0 draws for all processes: give it a __len__, or divide it by num_replicas and rank of "
                "strategy.distributed_sampler_kwargs and say so with Trainer(use_distributed_sampler=False), or with "
                "evaluation_loader(loader, distribute=False) of an OwnLoop"
            )
        return self._broadcast(items)


class DrawnOrder:
    """The order of a ``RandomSampler`` that repeats indices, or draws a number of them, as rank 0 draws it.

    Ranks have the seed in common, or the state of the sampler's generator, and draw the same indices as they read them.
    """

    def __init__(self, sampler: RandomSampler, broadcast: Callable[[Any], Any]) -> None:
        self.sampler = sampler
        self._broadcast = broadcast

    def __call__(self, _epoch: int, _times_read: int) -> Iterable[Any]:
        generator: torch.Generator | None = self.sampler.generator
        if generator is not None:
            generator.set_state(self._broadcast(generator.get_state()))
            return self.sampler
        seed = int(torch.empty((), dtype=torch.int64).random_().item())  # as RandomSampler.__iter__ does
        drawn = copy.copy(self.sampler)
        drawn.generator = torch.Generator().manual_seed(self._broadcast(seed))
        return drawn


def generators_of(sampler: Any) -> list[torch.Generator]:
    """Return the generators of torch that a sampler or batch sampler has, and those of samplers in it."""
    order = getattr(sampler, "order", None)
    inner = [getattr(sampler, "sampler", None), getattr(order, "sampler", None)]
    generator = getattr(sampler, "generator", None)
    generators = [generator] if isinstance(generator, torch.Generator) else []
    return generators + [generator for one in inner if one is not None for generator in generators_of(one)]


# Epochs of samplers and datasets


def set_epoch(loader: Any, epoch: int, *, datasets: bool = True) -> None:
    """Set the epoch of each sampler, loader and dataset that has ``set_epoch``.

    Args:
        loader: A loader, or a CombinedLoader.
        epoch: The epoch.
        datasets: Whether loaders and datasets are set too, not the samplers alone.
    """
    if isinstance(loader, CombinedLoader):
        for leaf in loader.flattened:
            set_epoch(leaf, epoch, datasets=datasets)
        return
    batches = getattr(loader, "batch_sampler", None)
    targets: list[Any] = [getattr(loader, "sampler", None), batches, getattr(batches, "sampler", None)]
    dataset = getattr(loader, "dataset", None) if datasets else None
    if datasets:
        targets = [loader, *targets, dataset]
    while isinstance(dataset, ShardedIterableDataset):
        dataset = dataset.dataset
    attributes = dict(getattr(dataset, "__dict__", {}))
    shared = [one for one in attributes.values() if isinstance(one, torch.Tensor) and one.is_shared()]
    versions = list(map(change_count, shared))
    for target in {id(target): target for target in targets}.values():  # each once: both may be one object
        if hasattr(target, "set_epoch"):
            target.set_epoch(epoch)
    if not hasattr(dataset, "set_epoch"):
        return
    # A stream of Hugging Face has its epoch in a tensor of shared memory, which workers see change; what is assigned
    # to an attribute they do not see.
    is_assigned = any(attributes.get(name) is not value for name, value in getattr(dataset, "__dict__", {}).items())
    if is_assigned or list(map(change_count, shared)) == versions:
        _restart_workers(loader)


def _restart_workers(loader: Any) -> None:
    """Let the next reading start new workers in place of persistent ones, whose dataset has the old epoch."""
    if getattr(loader, "persistent_workers", False) and drop_workers(loader):
        _log.info(
            "persistent workers are restarted, as %s.set_epoch does not reach them", type(loader.dataset).__name__
        )
