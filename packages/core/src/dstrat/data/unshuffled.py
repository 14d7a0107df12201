"""Loaders that give the same batches in every epoch, on which one lets a model overfit."""

from __future__ import annotations

import logging
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from dstrat.data.combined_loader import CombinedLoader
from dstrat.data.division import sampler_of, with_parts, with_sampler
from dstrat.data.structure import map_leaves

_log = logging.getLogger(__name__)


def unshuffled(loaders: Any) -> Any:
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
