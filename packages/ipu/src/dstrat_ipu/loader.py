"""Loaders whose items have the batches of one call of a compiled model."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from dstrat.data.combined_loader import CombinedLoader, map_sources
from dstrat.data.division import with_attributes
from dstrat.errors import ConflictError, RequestError
from dstrat_ipu import runtime

if TYPE_CHECKING:
    from collections.abc import Sized

_log = logging.getLogger(__name__)


def join_batches(loader: Any, options: Any, purpose: str) -> Any:
    """Return a loader whose batches have as many samples as one call consumes, without an incomplete last one.

    Args:
        loader: A DataLoader of the batches of one replica, one of poptorch's, or a CombinedLoader of them.
        options: Options of the model, with the number of batches in a call.
        purpose: Purpose of the loader, for messages.

    Raises:
        RequestError: The batches cannot be joined, or the loader has too few samples.
        ConflictError: poptorch's loader has other options than the model.
    """
    if isinstance(loader, CombinedLoader):
        return map_sources(loader, lambda one: join_batches(one, options, purpose))
    if isinstance(loader, runtime.poptorch().DataLoader):
        _check_options(loader.options, options, purpose)
        return loader  # its items have all batches of a call already
    factor = options.replication_factor * options.device_iterations * options.Training.gradient_accumulation
    is_plain = isinstance(loader, DataLoader) and loader.batch_size is not None
    if not is_plain or not isinstance(loader.batch_sampler, BatchSampler):
        raise RequestError(
            f"the {purpose} loader is a {type(loader).__name__}"
            + (" with a batch sampler or without a batch size" if isinstance(loader, DataLoader) else "")
            + f", whose batches cannot be joined for calls that consume {factor} each: give a torch DataLoader with a "
            "batch_size, or poptorch.DataLoader with the options of the model"
        )
    # poptorch divides the tensors of a call, along the first dimension, into the batches of all replicas.
    size = loader.batch_size * factor
    if not isinstance(loader.dataset, IterableDataset):  # whose end is not known before
        _check_samples(loader.sampler, size, loader.batch_size, factor, purpose)
    # Shapes are static: a shorter last item would need a graph of its own.
    batches = BatchSampler(loader.batch_sampler.sampler, size, drop_last=True)
    return with_attributes(loader, batch_sampler=batches, batch_size=size, drop_last=True)


def _check_samples(sampler: Sized, size: int, batch_size: int, factor: int, purpose: str) -> None:
    try:
        count = len(sampler)
    except (TypeError, NotImplementedError) as error:
        raise RequestError(
            f"the sampler of the {purpose} loader, a {type(sampler).__name__}, has no length, which says what does not "
            "fill a call: give it __len__, or the loader an IterableDataset"
        ) from error
    call = f"one call consumes {size} (batch_size={batch_size} times {factor})"
    if count < size:
        raise RequestError(
            f"the {purpose} loader has {count} samples, and {call}: give more data, a smaller batch_size, or fewer "
            "devices, device_iterations or accumulate_grad_batches"
        )
    if count % size:
        _log.warning(
            "the last %d of %d samples of the %s loader are left out of each epoch, as %s and shapes are static",
            count % size,
            count,
            purpose,
            call,
        )


def _check_options(of_loader: Any, required: Any, purpose: str) -> None:
    def values(options: Any) -> tuple[int, int, int]:
        return (options.replication_factor, options.device_iterations, options.Training.gradient_accumulation)

    if values(of_loader) != values(required):
        names = "replicationFactor, deviceIterations, gradientAccumulation"
        raise ConflictError(
            f"the {purpose} loader is a poptorch.DataLoader with ({names}) = {values(of_loader)}, and the model is "
            f"compiled with {values(required)}: give both the same options, or a torch DataLoader"
        )
