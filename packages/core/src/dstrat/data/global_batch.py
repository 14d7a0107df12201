"""Global batch of a fit that goes on with fewer ranks: the same samples in each optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from torch import Generator
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from dstrat.data.combined_loader import source_leaves
from dstrat.data.division import groups_samples, sampler_of
from dstrat.data.samplers import RankSampler

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchDivision:
    """Division of the batches of an optimizer step over fewer ranks.

    Attributes:
        accumulate: Number of batches of a rank whose gradients make up the step.
        share: Size of such a batch, in batches of the user's loader; at most 1 if gradients may be accumulated.
    """

    accumulate: int
    share: Fraction


def divide_global_batch(
    batch_sizes: Sequence[int], *, accumulate: int, ranks: int, fewer: int, accumulates: bool = True
) -> BatchDivision | None:
    """Divide the samples of an optimizer step evenly over fewer ranks; None if they cannot be.

    A rank never gets larger batches than before, which its memory might not hold: it accumulates more of them.

    Args:
        batch_sizes: Number of samples in a batch of each loader that is read in a step.
        accumulate: Number of batches that each rank accumulates in a step.
        ranks: Number of ranks for which these two numbers were chosen.
        fewer: Number of ranks now.
        accumulates: Whether the number of accumulated batches may change; otherwise batches become larger.
    """
    of_rank = Fraction(ranks * accumulate, fewer)  # batches of a step, for each of the ranks that remain
    smallest = min(batch_sizes, default=1)
    counts = range(-(-of_rank.numerator // of_rank.denominator), int(of_rank * smallest) + 1)
    for count in counts if accumulates else (accumulate,):
        share = of_rank / count
        if all((share * size).denominator == 1 for size in batch_sizes):
            return BatchDivision(accumulate=count, share=share)
    return None


def batch_sizes_of(loader: Any) -> list[int] | None:
    """Return the number of samples in a batch of each of the user's loaders; None unless they can be divided anew."""
    sizes = [_batch_size_of(leaf) if _can_repeat_order(leaf) else None for leaf in source_leaves(loader)]
    return None if None in sizes else [size for size in sizes if size is not None]


def epoch_lengths(loader: Any, *, ranks: int, share: Fraction | int = 1) -> list[int]:
    """Return how many batches each of a number of ranks reads of each of the user's loaders in an epoch.

    Args:
        loader: One for which :func:`batch_sizes_of` is not None.
        ranks: Number of ranks, which get equally many samples.
        share: Size of their batches, in batches of the loader.
    """
    lengths = []
    for leaf in source_leaves(loader):
        batches, samples = leaf.batch_sampler, math.ceil(len(sampler_of(leaf)) / ranks)
        size = int(batches.batch_size * share)
        lengths.append(samples // size if batches.drop_last else math.ceil(samples / size))
    return lengths


def drops_samples(loader: Any) -> bool:
    """Return whether one of the user's loaders leaves out the last samples of an epoch that are no full batch."""
    return any(leaf.batch_sampler.drop_last for leaf in source_leaves(loader))


def _batch_size_of(loader: Any) -> int | None:
    is_known = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if not is_known or not groups_samples(loader) or isinstance(sampler_of(loader), DistributedSampler):
        return None
    return int(loader.batch_sampler.batch_size)


def _can_repeat_order(loader: Any) -> bool:
    """Return whether the sampler of a loader gives the order of an epoch again, in the middle of which ranks are lost.

    torch's own draw from generators whose states are restored, and others may count epochs.  One with a generator of
    numpy or python would give the order of the next epoch.
    """
    if not isinstance(loader, DataLoader):
        return False
    sampler = sampler_of(loader)
    is_of_library = type(sampler).__module__.partition(".")[0] in {"torch", "torchdata"}
    return is_of_library or hasattr(sampler, "set_epoch") or isinstance(getattr(sampler, "generator", None), Generator)


def samples_per_batch(loader: Any, *, is_alone: bool) -> list[int] | None:
    """Return the number of samples in a batch of each prepared loader; None if it is unknown.

    Args:
        loader: The loader of this process; None before it is made.
        is_alone: Whether the job has one process, whose loaders need no division.
    """
    loaders = source_leaves(loader)
    sizes = [_batch_size_of(leaf) for leaf in loaders]
    is_divided = is_alone or all(
        isinstance(leaf, DataLoader) and isinstance(sampler_of(leaf), RankSampler) for leaf in loaders
    )
    return [size for size in sizes if size is not None] if is_divided and None not in sizes else None
