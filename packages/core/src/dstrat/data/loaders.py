"""Preparation of the user's loaders for one process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from dstrat.data.combined_loader import CombinedLoader, describe, is_structure, leaves, map_leaves, named_leaves
from dstrat.data.division import (
    divide_evaluation,
    divide_training,
    is_divisible,
    record_batches,
    sampler_of,
    with_parts,
    with_sampler,
)
from dstrat.data.equal_length import ShortestLoader
from dstrat.data.random_state import WorkerSeeds
from dstrat.data.resume import ContinuedLoader, StatefulLoader
from dstrat.data.sharded_dataset import ShardedIterableDataset
from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.interfaces.strategy import Strategy


def prepare_training_loader(loader: Any, strategy: Strategy, *, distribute: bool) -> Any:
    """Return the loader that this process trains from.

    Each process reads its part: of a plain sequential or shuffled loader, and of one with a sampler of the user's
    own in that sampler's order.  Processes that read the same part read it in the same order.  What cannot be divided
    is told in the log.  Several loaders are read together until the longest ends, unless they are in a CombinedLoader
    of another mode.

    Args:
        loader: A DataLoader or any other iterable; a list, tuple or dict of them; a CombinedLoader.
        strategy: Says how many processes share the data, and which this one is.
        distribute: Whether dstrat may divide the data.

    Raises:
        MisuseError: A loader has no batch, or the processes have different loaders.
    """
    if is_structure(loader):
        loader = CombinedLoader(loader, "max_size_cycle")
    _check_same(loader, "training", strategy)
    _check_not_empty(loader, "the training loader")
    agrees = distribute and _reads_with_others(strategy)

    def divided(part: Any) -> Any:
        is_divided = agrees and is_divisible(part, "training", strategy)
        part = divide_training(part, strategy) if is_divided else _for_all_workers(part)
        return _with_worker_seeds(part, strategy)

    loader = _map_loaders(loader, divided)
    _check_not_empty(loader, f"the part of the training data of rank {strategy.global_rank}")
    if strategy.world_size > 1 and not length_is_certain(loader):
        loader = ShortestLoader(loader, strategy)
    return strategy.process_dataloader(loader)


def prepare_evaluation_loader(
    loader: Any, strategy: Strategy, *, distribute: bool, records_indices: bool = False
) -> tuple[Any, bool]:
    """Return the loader that this process evaluates from, and whether its batches are divided between processes.

    In the whole job each sample is read once: process r of n reads the batches r, r + n, r + 2n and so on.

    Args:
        loader: A DataLoader or any other iterable, or a CombinedLoader.
        strategy: Says how many processes share the data, and which this one is.
        distribute: Whether dstrat may divide the data.
        records_indices: Whether :func:`~dstrat.data.division.take_indices` is going to be
            asked which samples a batch holds.

    Raises:
        MisuseError: The loader has no batch.
    """
    _check_not_empty(loader, "a loader for evaluation")
    agrees = distribute and _reads_with_others(strategy)
    parts = loader.flattened if isinstance(loader, CombinedLoader) else [loader]
    agrees = agrees and all([is_divisible(part, "evaluation", strategy) for part in parts])  # noqa: C419 - tells of each
    if agrees:
        repeat_to = _longest(loader)
        loader = _map_loaders(loader, lambda part: divide_evaluation(part, strategy, repeat_to=repeat_to))
    else:
        loader = _map_loaders(loader, _for_all_workers)
    loader = _map_loaders(loader, lambda part: _with_worker_seeds(part, strategy))
    if records_indices:
        loader = record_batches(loader)
    return strategy.process_evaluation_dataloader(loader), agrees and strategy.distributed_sampler_kwargs[
        "num_replicas"
    ] > 1


def _reads_with_others(strategy: Strategy) -> bool:
    """Return whether other processes read another part of the data, or the same one, in an order to agree on."""
    return strategy.world_size > 1 and bool(strategy.distributed_sampler_kwargs)


def _longest(loader: Any) -> int | None:
    """Return up to how many batches the parts of a loader are repeated, None where they are not."""
    return length_of(loader) if isinstance(loader, CombinedLoader) and loader.mode == "max_size_cycle" else None


def _for_all_workers(loader: Any) -> Any:
    """Return the loader with its iterable dataset told of the batch size, where it divides itself between workers."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, ShardedIterableDataset):
        return loader
    dataset = loader.dataset.divided(rank=0, num_replicas=1, batch_size=loader.batch_size, pads=False)
    return with_parts(loader, dataset=dataset)


def _with_worker_seeds(loader: Any, strategy: Strategy) -> Any:
    """Return the loader with workers that draw other random numbers than those of the first process."""
    rank = strategy.distributed_sampler_kwargs.get("rank", 0)  # the same where processes read the same data
    if rank == 0 or not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return loader
    return with_parts(loader, worker_init_fn=WorkerSeeds(rank, loader.worker_init_fn))


def _map_loaders(loader: Any, function: Callable[[Any], Any]) -> Any:
    if not isinstance(loader, CombinedLoader):
        return function(loader)
    return CombinedLoader(map_leaves(loader.iterables, function), loader.mode)


def _check_same(loader: Any, purpose: str, strategy: Strategy) -> None:
    """Raise MisuseError unless all processes have loaders of the same structure; collective."""
    if strategy.world_size == 1:
        return
    mine = describe(loader.iterables) if isinstance(loader, CombinedLoader) else describe(loader)
    first = strategy.broadcast(mine)
    if mine != first:
        raise MisuseError(
            f"the {purpose} loaders differ between processes, which have to make the same: "
            f"{first} on rank 0, {mine} on rank {strategy.global_rank}"
        )


def _check_not_empty(loader: Any, name: str) -> None:
    given = loader.iterables if isinstance(loader, CombinedLoader) else loader
    for place, part in named_leaves(given, name):
        if length_of(part) == 0:
            raise MisuseError(f"{place} has no batch: {_why_empty(part)}")


def _why_empty(loader: Any) -> str:
    samples = length_of(getattr(loader, "sampler", None))
    batch_size = getattr(loader, "batch_size", None)
    if samples and batch_size and getattr(loader, "drop_last", False):
        return f"its {samples} samples are fewer than batch_size={batch_size}, and drop_last=True leaves them out"
    return f"the length of the {type(loader).__name__} is 0, so give it data"


def as_list(loaders: Any) -> list[Any]:
    """Return the loaders that evaluation reads one after the other: none, one, or several.

    A CombinedLoader counts as one unless its mode is sequential.
    """
    if loaders is None:
        return []
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return loaders.flattened
    return list(leaves(loaders))


def length_is_certain(loader: Any) -> bool:
    """Return whether a loader has a length that is counted, rather than announced by an iterable dataset."""
    if isinstance(loader, ContinuedLoader | StatefulLoader):
        return length_is_certain(loader.loader)
    if isinstance(loader, CombinedLoader):
        return all(length_is_certain(part) for part in loader.flattened)
    if isinstance(loader, ShortestLoader) or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    return length_of(loader) is not None


def is_loaded_elsewhere(loader: Any) -> bool:
    """Return whether other processes load the batches, so that random numbers of this one do not depend on when."""
    if isinstance(loader, ContinuedLoader):
        return is_loaded_elsewhere(loader.loader)
    parts = loader.flattened if isinstance(loader, CombinedLoader) else [loader]
    return all(isinstance(part, DataLoader) and part.num_workers > 0 for part in parts)


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, None where it does not know."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def check_loaders(loaders: Any, name: str) -> None:
    """Raise MisuseError unless what was given is a loader, a structure of loaders, or a CombinedLoader."""
    for place, loader in named_leaves(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders, name):
        kind = type(loader).__name__
        if isinstance(loader, Tensor | str | bytes) and is_structure(loaders):
            raise MisuseError(
                f"{place} is of type {kind}, which is no loader: lists, tuples and dicts hold loaders, "
                "so pass batches of your own in a DataLoader(batches, batch_size=None)"
            )
        if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
            raise MisuseError(f"{place} is a dataset ({kind}): pass DataLoader(dataset, batch_size=...)")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise MisuseError(f"{place} is a {kind}, over which one cannot iterate: pass a DataLoader")


# Loaders that give the same batches in every epoch, on which one lets a model overfit.


_log = logging.getLogger(__name__)


def sequential(loaders: Any) -> Any:
    """Return loaders, in the structure in which they were given, that read the same samples in the same order always.

    Instead of being shuffled, the samples come in the order of the dataset; a sampler of the user's own draws once,
    and its order is kept.  What has no sampler is left as it is.
    """
    if isinstance(loaders, CombinedLoader):
        return CombinedLoader(map_leaves(loaders.iterables, _unshuffled), loaders.mode)
    return map_leaves(loaders, _unshuffled)


def _unshuffled(loader: Any) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        _log.warning("a %s cannot be kept from shuffling: overfit_batches takes what it gives", type(loader).__name__)
        return loader
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return with_parts(loader, batch_sampler=list(loader.batch_sampler))
    sampler = sampler_of(loader)
    if type(sampler) is SequentialSampler:
        return loader
    if type(sampler) is RandomSampler:
        _log.info("overfit_batches: the samples come in the order of the dataset instead of being shuffled")
        return with_sampler(loader, SequentialSampler(sampler.data_source))
    return with_sampler(loader, list(sampler))
