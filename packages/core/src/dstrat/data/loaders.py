"""Preparation of the user's loaders for one process."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler

from dstrat.data.combined_loader import (
    CombinedLoader,
    describe,
    is_structure,
    leaves,
    map_sources,
    named_leaves,
    source_leaves,
)
from dstrat.data.division import (
    check_division,
    divide_evaluation,
    divide_training,
    is_divisible,
    record_batches,
    sampler_of,
    with_attributes,
    with_sampler,
)
from dstrat.data.equal_length import ShortestLoader
from dstrat.data.random_state import WorkerSeeds
from dstrat.data.resume import ResumedLoader, StatefulLoader
from dstrat.data.sharded_dataset import ShardedIterableDataset
from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.strategy import Strategy


def prepare_training_loader(loader: Any, strategy: Strategy, *, distribute: bool, keeps_order: bool = False) -> Any:
    """Return the loader that this process trains from.

    Each process reads its shard, in an order that all processes share.  A custom sampler is drawn on rank 0.  A loader
    that cannot be divided is reported as a warning.  Several loaders are read together until the longest ends, unless
    they are in a CombinedLoader of another mode.

    Args:
        loader: A DataLoader or any other iterable; a list, tuple or dict of them; a CombinedLoader.
        strategy: Says how many processes share the data, and which this one is.
        distribute: Whether dstrat may divide the data.
        keeps_order: Whether a process alone reads in the order that several share, to continue an epoch that they have
            begun.

    Raises:
        MisuseError: A loader has no batch, the processes have different loaders, or processes that share a batch would
            read different ones.
    """
    if is_structure(loader):
        loader = CombinedLoader(loader, "max_size_cycle")
    _check_same(loader, "training", strategy)
    _check_not_empty(loader, "the training loader")
    # Several jobs may share the data, too, of which each has one process.
    is_shared = _shares_data(strategy) or strategy.training_sampler_kwargs.get("num_replicas", 1) > 1
    agrees = distribute and (keeps_order or is_shared)

    def divided(leaf: Any) -> Any:
        check_division(leaf, "training", strategy, strategy.training_sampler_kwargs)
        is_divided = agrees and is_divisible(leaf, "training", strategy)
        leaf = divide_training(leaf, strategy) if is_divided else _for_all_workers(leaf)
        return _with_worker_seeds(leaf, strategy.training_sampler_kwargs)

    loader = map_sources(loader, divided)
    # Again: with few samples and drop_last, a shard may be empty though the data is not.
    _check_not_empty(loader, f"the part of the training data of rank {strategy.global_rank}")
    # Where a process had an extra batch, its collectives would wait for the others without end.
    if strategy.world_size > 1 and not length_is_certain(loader):
        loader = ShortestLoader(loader, strategy)
    return strategy.process_dataloader(loader)


def prepare_evaluation_loader(
    loader: Any, strategy: Strategy, *, distribute: bool, records_indices: bool = False, keeps_batches: bool = False
) -> tuple[Any, bool]:
    """Return the loader that this process evaluates from, and whether its batches are divided between processes.

    In the whole job each sample is read once: process r of n reads the batches r, r + n, r + 2n and so on.  Fewer
    batches than processes are cut, so that each process has samples, as long as there are as many.

    Args:
        loader: A DataLoader or any other iterable, or a CombinedLoader.
        strategy: Says how many processes share the data, and which this one is.
        distribute: Whether dstrat may divide the data.
        records_indices: Whether :func:`~dstrat.data.division.take_indices` is going to be called for each batch.
        keeps_batches: Whether batches are never cut, as the results for each of them are returned.

    Raises:
        MisuseError: The loader has no batch, or processes that share a batch would read different ones.
    """
    _check_not_empty(loader, "a loader for evaluation")
    agrees = distribute and _shares_data(strategy)
    loaders = source_leaves(loader)
    for leaf in loaders:
        check_division(leaf, "evaluation", strategy, strategy.distributed_sampler_kwargs)
    # All or none: batches that are read together must be those of one position.
    agrees = agrees and all([is_divisible(leaf, "evaluation", strategy) for leaf in loaders])  # noqa: C419 - a warning for each
    if agrees:
        repeats = isinstance(loader, CombinedLoader) and loader.mode == "max_size_cycle"
        # Shorter loaders start again as in one process, before the division and not after it.
        repeat_to = length_of(loader) if repeats else None
        # Batches that are read together stay together.
        cuts = not keeps_batches and not isinstance(loader, CombinedLoader)
        loader = map_sources(loader, lambda leaf: divide_evaluation(leaf, strategy, cuts=cuts, repeat_to=repeat_to))
    else:
        loader = map_sources(loader, _for_all_workers)
    loader = map_sources(loader, lambda leaf: _with_worker_seeds(leaf, strategy.distributed_sampler_kwargs))
    if records_indices:
        loader = record_batches(loader)
    return strategy.process_evaluation_dataloader(loader), agrees and strategy.distributed_sampler_kwargs[
        "num_replicas"
    ] > 1


def _shares_data(strategy: Strategy) -> bool:
    """Return whether the processes read from one order of the data, which they have to agree on."""
    return strategy.world_size > 1 and bool(strategy.distributed_sampler_kwargs)


def _for_all_workers(loader: Any) -> Any:
    """Return the loader with the batch size set in its dataset, where that divides itself between workers."""
    if not isinstance(loader, DataLoader) or not isinstance(loader.dataset, ShardedIterableDataset):
        return loader
    dataset = loader.dataset.divided(rank=0, num_replicas=1, batch_size=loader.batch_size, pads=False)
    return with_attributes(loader, dataset=dataset)


def _with_worker_seeds(loader: Any, share: Mapping[str, int]) -> Any:
    """Return the loader with worker seeds that differ from those of the first process."""
    rank = share.get("rank", 0)  # not the process's rank: the same where processes read the same data
    if rank == 0 or not isinstance(loader, DataLoader) or loader.num_workers == 0:
        return loader
    return with_attributes(loader, worker_init_fn=WorkerSeeds(rank, loader.worker_init_fn))


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
    loaders = loader.iterables if isinstance(loader, CombinedLoader) else loader
    for leaf_name, leaf in named_leaves(loaders, name):
        if length_of(leaf) == 0:
            raise MisuseError(f"{leaf_name} has no batch: {_why_empty(leaf)}")


def _why_empty(loader: Any) -> str:
    samples = length_of(getattr(loader, "sampler", None))
    batch_size = getattr(loader, "batch_size", None)
    if samples and batch_size and getattr(loader, "drop_last", False):
        return f"its {samples} samples are fewer than batch_size={batch_size}, and drop_last=True leaves them out"
    return f"the length of the {type(loader).__name__} is 0, so give it data"


def as_list(loaders: Any) -> list[Any]:
    """Return the loaders that evaluation reads in sequence: none, one, or several.

    A CombinedLoader counts as one unless its mode is sequential.
    """
    if loaders is None:
        return []
    if isinstance(loaders, CombinedLoader) and loaders.mode == "sequential":
        return loaders.flattened
    return list(leaves(loaders))


def length_is_certain(loader: Any) -> bool:
    """Return whether a loader's length is exact, rather than a claim of an iterable dataset."""
    if isinstance(loader, ResumedLoader | StatefulLoader):
        return length_is_certain(loader.loader)
    if isinstance(loader, CombinedLoader):
        return all(length_is_certain(leaf) for leaf in loader.flattened)
    if isinstance(loader, ShortestLoader) or isinstance(getattr(loader, "dataset", None), IterableDataset):
        return False
    return length_of(loader) is not None


def loads_in_workers(loader: Any) -> bool:
    """Return whether worker processes load the batches, so that prefetching does not change random numbers here."""
    if isinstance(loader, ResumedLoader | StatefulLoader | ShortestLoader):
        return loads_in_workers(loader.loader)
    return all(isinstance(leaf, DataLoader) and leaf.num_workers > 0 for leaf in source_leaves(loader))


def reads_ahead(loader: Any, *, copies_ahead: bool) -> bool:
    """Return whether the next batch is loaded and copied to the device before the step of the one before.

    Args:
        loader: The loader.
        copies_ahead: Whether the device copies during a step.
    """
    # Else a checkpoint would have the random state after samples that a resume loads again.
    return copies_ahead and loads_in_workers(loader)


def length_of(loader: Any) -> int | None:
    """Return the number of batches of a loader, None where it is unknown."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None


def check_loaders(loaders: Any, name: str) -> None:
    """Raise MisuseError unless the argument is a loader, a structure of loaders, or a CombinedLoader."""
    for leaf_name, loader in named_leaves(loaders.iterables if isinstance(loaders, CombinedLoader) else loaders, name):
        kind = type(loader).__name__
        if isinstance(loader, type):
            raise MisuseError(f"{leaf_name} is the class {loader.__name__}: pass an instance, {loader.__name__}(...)")
        if isinstance(loader, Tensor | str | bytes) and is_structure(loaders):
            raise MisuseError(
                f"{leaf_name} is of type {kind}, not a loader: lists, tuples and dicts hold loaders, "
                "so pass batches of your own in a DataLoader(batches, batch_size=None)"
            )
        if isinstance(loader, Dataset) and not hasattr(loader, "__iter__"):
            raise MisuseError(f"{leaf_name} is a dataset ({kind}): pass DataLoader(dataset, batch_size=...)")
        if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
            raise MisuseError(f"{leaf_name} is a {kind}, over which one cannot iterate: pass a DataLoader")


# Loaders without shuffling, for overfit_batches


_log = logging.getLogger(__name__)


def sequential(loaders: Any) -> Any:
    """Return the same structure of loaders, which read the same samples in the same order in every epoch.

    A shuffled loader is read in the order of the dataset.  A custom sampler is drawn once, and its order is reused.
    A loader without a sampler stays unchanged.
    """
    return map_sources(loaders, _make_sequential)


def _make_sequential(loader: Any) -> Any:
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        _log.warning("a %s cannot be kept from shuffling: overfit_batches takes what it gives", type(loader).__name__)
        return loader
    # Drawn once: in the next epoch it might draw others.
    if loader.batch_sampler is not None and type(loader.batch_sampler) is not BatchSampler:
        return with_attributes(loader, batch_sampler=list(loader.batch_sampler))
    sampler = sampler_of(loader)
    if type(sampler) is SequentialSampler:
        return loader
    if type(sampler) is RandomSampler:
        _log.info("overfit_batches: the samples come in the order of the dataset instead of being shuffled")
        return with_sampler(loader, SequentialSampler(sampler.data_source))
    return with_sampler(loader, list(sampler))
