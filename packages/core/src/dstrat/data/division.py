"""Division of a DataLoader between processes, and the record of its batches."""

from __future__ import annotations

import copy
import logging
import sys
from collections import deque
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from dstrat.data.samplers import (
    AgreedSampler,
    BroadcastOrder,
    CutBatches,
    DrawnOrder,
    RankBatchSampler,
    RankSampler,
    RepeatedBatches,
    SequentialOrder,
    ShuffledOrder,
)
from dstrat.data.sharded_dataset import ShardedIterableDataset
from dstrat.errors import MisuseError, RequestError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from fractions import Fraction

    from dstrat.data.samplers import Order
    from dstrat.interfaces.strategy import Strategy


_log = logging.getLogger(__name__)


def is_divisible(loader: Any, purpose: str, strategy: Strategy) -> bool:
    """Return whether dstrat divides the loader; where it cannot and should, say so once for the job."""
    if not isinstance(loader, DataLoader):
        reason = f"is of type {type(loader).__name__}, and dstrat divides only a DataLoader"
    elif isinstance(loader.dataset, IterableDataset) and not isinstance(loader.dataset, ShardedIterableDataset):
        reason = "has an iterable dataset, which dstrat divides only inside a dstrat.ShardedIterableDataset"
    else:
        # Divided already: by the user, or by dstrat, as a loader may be prepared twice.
        return not isinstance(sampler_of(loader), DistributedSampler | RankSampler)
    share = strategy.training_sampler_kwargs if purpose == "training" else strategy.distributed_sampler_kwargs
    if strategy.is_global_zero and share.get("num_replicas", 1) > 1:
        _log.warning(
            "the %s loader %s: unless it divides itself by rank, each of the %d processes reads all of it",
            purpose,
            reason,
            # More replicas than ranks are several jobs, and fewer are ranks that share each batch.
            max(strategy.world_size, share["num_replicas"]),
        )
    return False


def check_division(loader: Any, purpose: str, strategy: Strategy, share: Mapping[str, int]) -> None:
    """Check that ranks that share a batch read the same, where the user has divided the loader by torch's sampler.

    Raises:
        MisuseError: It is divided among all ranks, or another rank's share is read.
    """
    if not isinstance(loader, DataLoader) or share.get("num_replicas", strategy.world_size) >= strategy.world_size:
        return
    batch_sampler: Any = loader.batch_sampler
    for sampler in (loader.sampler, batch_sampler, getattr(batch_sampler, "sampler", None)):
        if not isinstance(sampler, DistributedSampler):
            continue
        divided, readers = {"num_replicas": sampler.num_replicas, "rank": sampler.rank}, share["num_replicas"]
        # Another number is that of a part of the ranks, such as those of a machine that has data of its own.
        if divided != share and sampler.num_replicas in (readers, strategy.world_size):
            raise MisuseError(
                f"the {purpose} loader has a {type(sampler).__name__} with num_replicas={divided['num_replicas']} and "
                f"rank={divided['rank']}, and several of the {strategy.world_size} ranks of {type(strategy).__name__} "
                f"share each batch: pass it num_replicas={readers} and rank={share['rank']}, which "
                "strategy.distributed_sampler_kwargs has, or leave it out, as dstrat divides the loader"
            )


def divide_training(loader: DataLoader[Any], strategy: Strategy) -> DataLoader[Any]:
    """Return the loader with this process's shard of the samples; all shards are of the same length."""
    share = strategy.training_sampler_kwargs or {"num_replicas": 1, "rank": 0}
    if isinstance(loader.dataset, ShardedIterableDataset):
        return with_attributes(loader, dataset=loader.dataset.divided(**share, batch_size=loader.batch_size, pads=True))
    if loader.batch_sampler is not None and not groups_samples(loader):
        if share["num_replicas"] == 1:
            return _with_shared_batches(loader, strategy)
        raise RequestError(
            f"the training loader has a batch sampler of its own ({type(loader.batch_sampler).__name__}), which dstrat "
            "cannot divide evenly between processes: divide it by num_replicas and rank of "
            "strategy.distributed_sampler_kwargs, and say so with Trainer(use_distributed_sampler=False), or with "
            "training_loader(loader, distribute=False) of an OwnLoop"
        )
    sampler = sampler_of(loader)
    _check_length(sampler, "training")
    return with_sampler(loader, RankSampler(_order(sampler, strategy, loader), length=len(sampler), **share))


def divide_evaluation(
    loader: DataLoader[Any], strategy: Strategy, *, cuts: bool = False, repeat_to: int | None = None
) -> DataLoader[Any]:
    """Return the loader with every n-th batch.

    Args:
        loader: The loader of the whole job.
        strategy: Says how many processes share the data, and which this one is.
        cuts: Whether batches are cut where they are fewer than the processes.
        repeat_to: Number of batches of the whole job up to which the loader is repeated; None does not.
    """
    share = strategy.distributed_sampler_kwargs
    if isinstance(loader.dataset, ShardedIterableDataset):
        return with_attributes(
            loader, dataset=loader.dataset.divided(**share, batch_size=loader.batch_size, pads=False)
        )
    batch_sampler = loader.batch_sampler
    sampler: Any = sampler_of(loader) if batch_sampler is None or groups_samples(loader) else batch_sampler
    if sampler is not batch_sampler or _length_of(sampler) is not None:  # its batches may end without a length
        _check_length(sampler, "evaluation")
    order = _order(sampler, strategy, loader)
    batches: Any = AgreedSampler(order, sampler)
    if groups_samples(loader):
        batches = _regrouped(batch_sampler, batches)
        if cuts and len(batches) < share["num_replicas"]:
            num_samples = len(batches) * batches.batch_size if batches.drop_last else len(sampler)
            batches = CutBatches(batches, num_samples=num_samples, num_replicas=share["num_replicas"])
    if repeat_to is not None:
        batches = RepeatedBatches(batches, repeat_to)
    rank_batches = RankBatchSampler(batches, order, **share)
    return with_attributes(loader, **{"sampler" if loader.batch_sampler is None else "batch_sampler": rank_batches})


def _with_shared_batches(loader: DataLoader[Any], strategy: Strategy) -> DataLoader[Any]:
    """Return the loader with the batches of the user's own batch sampler that rank 0 draws, in every process."""
    batch_sampler: Any = loader.batch_sampler
    if strategy.world_size == 1:
        return loader
    if not hasattr(batch_sampler, "__len__"):  # it may have no end
        if strategy.is_global_zero:
            _log.warning(
                "the training loader has a batch sampler without a length (%s): each of the %d processes that share "
                "a batch draws from it, so it has to give all of them the same batches",
                type(batch_sampler).__name__,
                strategy.world_size,
            )
        return loader
    return with_attributes(loader, batch_sampler=AgreedSampler(_order(batch_sampler, strategy, loader), batch_sampler))


def sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that gives the order: that of the batch sampler, where the user passed one."""
    batch_sampler: Any = loader.batch_sampler
    return batch_sampler.sampler if groups_samples(loader) else loader.sampler


def with_sampler(loader: DataLoader[Any], sampler: Any) -> DataLoader[Any]:
    """Return a copy of a loader that reads the samples in another order."""
    batch_sampler: Any = loader.batch_sampler
    if batch_sampler is None:
        return with_attributes(loader, sampler=sampler)
    return with_attributes(loader, sampler=sampler, batch_sampler=_regrouped(batch_sampler, sampler))


def groups_samples(loader: DataLoader[Any]) -> bool:
    """Return whether the batch sampler only groups the indices of the sampler, as torch's ``BatchSampler`` does."""
    batch_sampler = loader.batch_sampler
    # torchdata's StatefulDataLoader makes one of a class of its own. A loader to which the user passed a batch sampler
    # has no batch size.
    return type(batch_sampler) is BatchSampler or (
        isinstance(batch_sampler, BatchSampler) and loader.batch_size is not None
    )


def _regrouped(batches: Any, sampler: Any) -> Any:
    copied = copy.copy(batches)
    copied.sampler = sampler
    return copied


def with_share(loader: DataLoader[Any], share: Fraction) -> DataLoader[Any]:
    """Return a copy of a loader of which each batch is that share of its batches."""
    batches: Any = copy.copy(loader.batch_sampler)
    batches.batch_size = int(batches.batch_size * share)
    return with_attributes(loader, batch_size=batches.batch_size, batch_sampler=batches)


def with_attributes(loader: DataLoader[Any], **attributes: Any) -> DataLoader[Any]:
    """Return a copy of a loader of any class with another sampler, batch sampler or dataset."""
    copied = copy.copy(loader)
    # Written into __dict__, because a DataLoader raises when they are set after its construction.  Its _iterator is
    # that of persistent workers, which stay with the original and have its dataset and samplers.
    copied.__dict__.update(attributes, _iterator=None)
    return copied


def _order(sampler: Any, strategy: Strategy, loader: DataLoader[Any]) -> Order:
    """Return the order of indices, which is the same in every process."""
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler))
    if _is_plain_random(sampler, loader):
        return ShuffledOrder(sampler.data_source, strategy.broadcast(torch.initial_seed() % 2**32))
    if type(sampler) is RandomSampler and (sampler.replacement or sampler._num_samples):  # noqa: SLF001 - num_samples is a length
        return DrawnOrder(sampler, strategy.broadcast)
    return BroadcastOrder(sampler, strategy.broadcast, most=_MOST_BATCHES if _length_of(sampler) is None else None)


_MOST_DRAWN = 10**9  # indices of which rank 0 sends a list, of 8 GiB and more
_MOST_BATCHES = 10**6  # of a batch sampler without a length, which may have no end


def _length_of(sampler: Any) -> int | None:
    try:
        return len(sampler)
    except (TypeError, NotImplementedError):  # without __len__, or with one that says so, as torch's samplers may
        return None


def _check_length(sampler: Any, purpose: str) -> None:
    """Check that the order of a sampler ends, and fits into memory where rank 0 draws it for all.

    Raises:
        RequestError: It does not, as that of a sampler that repeats the data without end.
    """
    length = _length_of(sampler)
    draws_for_all = type(sampler) not in (SequentialSampler, RandomSampler)
    if length is None or (draws_for_all and length > _MOST_DRAWN):
        name = type(sampler).__name__
        raise RequestError(
            f"the {purpose} loader has a sampler {'without a length' if length is None else f'of {length} indices'} "
            f"({name}), whose order rank 0 cannot draw for all processes: divide it by num_replicas and rank of "
            "strategy.distributed_sampler_kwargs, and say so with Trainer(use_distributed_sampler=False), or with "
            f"{purpose}_loader(loader, distribute=False) of an OwnLoop"
        )


def _is_plain_random(sampler: Any, loader: DataLoader[Any]) -> bool:
    """Return whether a sampler shuffles with torch's global generator and without replacement."""
    kind: Any = type(sampler)
    if kind is RandomSampler:
        has_generator = sampler.generator is not None
    else:  # that of torchdata's StatefulDataLoader, which makes a generator where the loader was given none
        stateful = getattr(sys.modules.get("torchdata.stateful_dataloader.sampler"), "RandomSampler", None)
        has_generator = kind is not stateful or loader.generator is not None
    return not has_generator and not sampler.replacement and not sampler._num_samples  # noqa: SLF001 - torch offers no other way to know


# Records of the dataset indices of each batch


class RecordedBatches(Sampler[Any]):
    """The batches of another batch sampler (or the indices of a sampler), recorded until they are taken.

    A loader draws batches ahead of time and yields them in the same order, so a queue matches them.

    Args:
        batches: Any sampler or batch sampler.
    """

    def __init__(self, batches: Any) -> None:
        self._batches = batches
        self._pending: deque[Any] = deque()

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        self._pending.clear()  # of a reading that was left before its end
        for batch in self._batches:
            self._pending.append(batch)
            yield batch

    def take(self) -> list[Any]:
        """Return the indices of the batch that the loader yielded last."""
        batch = self._pending.popleft()
        return list(batch) if isinstance(batch, list | tuple) else [batch]


def record_batches(loader: Any) -> Any:
    """Return a loader that records the indices of its batches; a loader without indices is returned unchanged."""
    has_indices = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not has_indices or not getattr(loader, "in_order", True):  # without the order, no queue matches the batches
        return loader
    if loader.batch_sampler is None:
        return with_attributes(loader, sampler=RecordedBatches(loader.sampler))
    return with_attributes(loader, batch_sampler=RecordedBatches(loader.batch_sampler))


def take_indices(loader: Any) -> list[Any] | None:
    """Return the dataset indices of a loader's latest batch; None where they are unknown.

    Call it once per batch, with a loader that :func:`record_batches` returned.
    """
    for sampler in (getattr(loader, "batch_sampler", None), getattr(loader, "sampler", None)):
        if isinstance(sampler, RecordedBatches):
            return sampler.take()
    return None
