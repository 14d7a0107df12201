"""Bringing the user's loaders into the form in which a process reads them."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from dstrat.errors import MisuseError, RequestError
from dstrat.training.data.samplers import (
    AgreedSampler,
    BroadcastOrder,
    RankBatchSampler,
    RankSampler,
    SequentialOrder,
    ShuffledOrder,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dstrat.interfaces.strategy import Strategy

_log = logging.getLogger(__name__)


def prepare_training_loader(loader: Any, strategy: Strategy, *, distribute: bool) -> Any:
    """Return the loader that this process trains from.

    Each process reads its part: of a plain sequential or shuffled loader, and of one with a sampler of the user's
    own in that sampler's order.  What cannot be divided is told in the log.

    Args:
        loader: A DataLoader or any other iterable.
        strategy: Says how many processes share the data, and which this one is.
        distribute: Whether dstrat may divide the data.
    """
    share = strategy.distributed_sampler_kwargs
    if distribute and share.get("num_replicas", 1) > 1:
        loader = _divide_training(loader, strategy, share)
    return strategy.process_dataloader(loader)


def prepare_evaluation_loader(loader: Any, strategy: Strategy, *, distribute: bool) -> tuple[Any, bool]:
    """Return the loader that this process evaluates from, and whether its batches are divided between processes.

    In the whole job each sample is read once: process r of n reads the batches r, r + n, r + 2n and so on.
    """
    share = strategy.distributed_sampler_kwargs
    divides = distribute and share.get("num_replicas", 1) > 1 and _divisible(loader, "evaluation", strategy)
    if divides:
        loader = _divide_evaluation(loader, strategy, share)
    return strategy.process_dataloader(loader), divides


def _divide_training(loader: Any, strategy: Strategy, share: dict[str, int]) -> Any:
    if not _divisible(loader, "training", strategy):
        return loader
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        raise RequestError(
            f"the training loader has a batch sampler of its own ({type(loader.batch_sampler).__name__}), which dstrat "
            "cannot divide evenly between processes: divide it by trainer.global_rank and trainer.world_size in "
            "train_dataloader, and pass Trainer(use_distributed_sampler=False)"
        )
    given = _sampler_of(loader)
    sampler = RankSampler(_order(given, strategy), length=len(given), **share)
    if loader.batch_sampler is None:
        return _with(loader, sampler=sampler)
    batches = BatchSampler(sampler, loader.batch_sampler.batch_size, loader.batch_sampler.drop_last)
    return _with(loader, sampler=sampler, batch_sampler=batches)


def _divide_evaluation(loader: Any, strategy: Strategy, share: dict[str, int]) -> Any:
    batches = loader.batch_sampler
    if batches is not None and type(batches) is not BatchSampler:
        agreed = AgreedSampler(BroadcastOrder(batches, strategy.broadcast), length=len(batches))
        return _with(loader, batch_sampler=RankBatchSampler(agreed, **share))
    given = _sampler_of(loader)
    sampler = AgreedSampler(_order(given, strategy), length=len(given))
    if batches is None:
        return _with(loader, sampler=RankBatchSampler(sampler, **share))
    batches = BatchSampler(sampler, batches.batch_size, batches.drop_last)
    return _with(loader, batch_sampler=RankBatchSampler(batches, **share))


def _sampler_of(loader: DataLoader[Any]) -> Any:
    """Return the sampler that gives the order: that of the batch sampler, where the user passed one."""
    return loader.batch_sampler.sampler if type(loader.batch_sampler) is BatchSampler else loader.sampler


def _divisible(loader: Any, purpose: str, strategy: Strategy) -> bool:
    """Return whether dstrat divides the loader; where it cannot, say so once for the job."""
    if not isinstance(loader, DataLoader):
        reason = f"is a {type(loader).__name__}, not a DataLoader"
    elif isinstance(loader.dataset, IterableDataset):
        reason = "has an iterable dataset"
    else:
        return not isinstance(_sampler_of(loader), DistributedSampler | RankSampler)
    if strategy.is_global_zero:
        _log.warning(
            "the %s loader %s, which dstrat cannot divide: unless it divides itself by rank, "
            "each of the %d processes reads all of it",
            purpose,
            reason,
            strategy.world_size,
        )
    return False


def _order(sampler: Any, strategy: Strategy) -> Callable[[int], Iterable[int]]:
    """Return what gives the indices of an epoch in the same order in every process."""
    if type(sampler) is SequentialSampler:
        return SequentialOrder(len(sampler))
    if type(sampler) is RandomSampler and not sampler.replacement and not sampler._num_samples:  # noqa: SLF001 - torch offers no other way to know
        return ShuffledOrder(sampler.data_source, strategy.broadcast(torch.initial_seed() % 2**32))
    return BroadcastOrder(sampler, strategy.broadcast)


def _with(loader: DataLoader[Any], **samplers: Any) -> DataLoader[Any]:
    """Return a copy of a loader, of whatever class, with other samplers.

    Written into ``__dict__`` because a DataLoader refuses to have them set after its construction.
    """
    copied = copy.copy(loader)
    copied.__dict__.update(samplers, _iterator=None)
    return copied


def as_list(loaders: Any) -> list[Any]:
    """Return the loaders as a list: none, one, or several."""
    if loaders is None:
        return []
    return list(loaders) if isinstance(loaders, list | tuple) else [loaders]


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, None where it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def limit_of(limit: float | None, length: int | None, name: str) -> int | None:
    """Return how many batches to take at most; None takes all.

    Args:
        limit: A number of batches (int), a fraction of them (float from 0 to 1), or None.
        length: Number of batches there are, None where unknown.
        name: The argument's name, for messages.

    Raises:
        RequestError: A fraction of an unknown length.
    """
    if limit is None or (limit == 1.0 and isinstance(limit, float)):
        return length
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if length is None:
        raise RequestError(f"{name}={limit!r} is a fraction, and the loader has no length: give a number of batches")
    taken = int(limit * length)
    if taken == 0 and limit > 0 and length > 0:
        raise RequestError(f"{name}={limit!r} of {length} batches is less than one: give a number of batches")
    return taken


def check_limit(limit: Any, name: str) -> None:
    """Raise RequestError unless the limit is None, a count, or a fraction from 0 to 1."""
    counts = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    fraction = isinstance(limit, float) and 0.0 <= limit <= 1.0
    if limit is not None and not counts and not fraction:
        raise RequestError(f"{name}={limit!r} must be a number of batches (int) or a fraction from 0.0 to 1.0 (float)")


def check_iterable(loader: Any, name: str) -> None:
    """Raise MisuseError unless one can iterate over the loader."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise MisuseError(f"{name} is a {type(loader).__name__}, over which one cannot iterate: pass a DataLoader")
