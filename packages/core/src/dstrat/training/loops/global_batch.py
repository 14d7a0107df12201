"""Global batch of an elastic fit: fewer ranks train on the same samples in each optimizer step."""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from dstrat.data.combined_loader import CombinedLoader, map_leaves
from dstrat.data.division import with_share
from dstrat.data.global_batch import batch_sizes_of, divide_global_batch, drops_samples, epoch_lengths
from dstrat.data.limits import limit_of
from dstrat.errors import RequestError

if TYPE_CHECKING:
    from dstrat.data.global_batch import BatchDivision
    from dstrat.training.run import Run
    from dstrat.training.settings import TrainerSettings

_log = logging.getLogger(__name__)


def keep_global_batch(run: Run, loader: Any) -> Any:
    """Return the user's training loader, with smaller batches where fewer ranks train than were started.

    Then the Trainer's settings have, until :func:`restore_settings`, as many accumulated batches as make an optimizer
    step of the same samples.

    Raises:
        RequestError: The samples cannot be divided.
    """
    if not run.plan.elastic:
        cluster = run.strategy.components.cluster_environment
        if cluster is not None and cluster.num_started > cluster.world_size and run.is_global_zero:
            _log.warning(
                "%d of %d ranks train, as others were killed in an earlier fit: each step has fewer samples",
                cluster.world_size,
                cluster.num_started,
            )
        return loader
    restore_settings(run)  # of the loader before this one
    started = run.plan.world_size
    run.sizes = [ranks for ranks in range(1, started + 1) if _divide(run, loader, ranks) is not None]
    if run.world_size == started:
        if len(run.sizes) <= 1 < started:
            warn_of_restarts(run, "with this loader and these settings, fewer ranks cannot train on the same samples")
        return loader
    divided = _divide(run, loader, run.world_size)
    if divided is None:
        raise RequestError(
            f"the batches of a step on {started} ranks cannot be divided evenly over the {run.world_size} that remain: "
            "choose a batch_size that has more divisors"
        )
    division, scaled = divided
    if run.is_global_zero:
        _log.warning(
            "%d of %d ranks train: the samples of a step stay the same, in %d batches of %s samples on each rank",
            run.world_size,
            started,
            division.accumulate,
            " and ".join(str(int(size * division.share)) for size in batch_sizes_of(loader) or ()),
        )
    for name, value in scaled.items():
        run.scaled_settings[name] = (getattr(run.trainer, name), value)
        setattr(run.trainer, name, value)
    if isinstance(loader, CombinedLoader):
        return CombinedLoader(map_leaves(loader.iterables, lambda leaf: with_share(leaf, division.share)), loader.mode)
    return map_leaves(loader, lambda leaf: with_share(leaf, division.share))


def restore_settings(run: Run) -> None:
    """Set the user's values in place of those for fewer ranks, unless the user has changed these since."""
    for name, (of_user, scaled) in run.scaled_settings.items():
        if getattr(run.trainer, name) is scaled:
            setattr(run.trainer, name, of_user)
    run.scaled_settings.clear()


def _divide(run: Run, loader: Any, ranks: int) -> tuple[BatchDivision, dict[str, Any]] | None:
    """Return the division of a step over a number of ranks, and its settings; None if samples or steps would differ."""
    settings, sizes, started = run.settings, batch_sizes_of(loader), run.plan.world_size
    is_divided = settings.data.use_distributed_sampler and not any(
        hasattr(callback, "get_accumulate_grad_batches") for callback in run.callbacks
    )
    if sizes is None or not is_divided:
        return None
    division = divide_global_batch(
        sizes,
        accumulate=settings.steps.accumulate_grad_batches,
        ranks=started,
        fewer=ranks,
        accumulates=run.module.automatic_optimization,
    )
    if division is None:
        return None
    before = epoch_lengths(loader, ranks=started)
    after = epoch_lengths(loader, ranks=ranks, share=division.share)
    divided = _divided(settings, division, before, after, drops=drops_samples(loader))
    return None if divided is None else (division, divided)


def _divided(
    settings: TrainerSettings, division: BatchDivision, before: list[int], after: list[int], *, drops: bool
) -> dict[str, Any] | None:
    """Return the settings that are numbers of batches, by name, for smaller ones; None if they are no whole numbers.

    Args:
        settings: Of the user.
        division: Of a step.
        before: Number of batches of each loader in an epoch.
        after: That of the smaller batches.
        drops: Whether a loader drops samples, with which smaller batches would be filled.
    """
    scale = Fraction(division.accumulate, settings.steps.accumulate_grad_batches)
    limit: Any = settings.data.limit_train_batches
    interval: Any = settings.evaluation.val_check_interval
    if len(before) == 1:  # otherwise the loaders' mode says how many batches an epoch has
        count = limit_of(limit, before[0], "limit_train_batches") or 0
        limit = count if drops or count < before[0] else 1.0
        if isinstance(interval, float) and interval != 1.0:  # a fraction of other batches may end within a step
            interval = max(1, int(interval * count))  # as ValidationSchedule counts
    scaled = [value * scale if isinstance(value, int) else value for value in (limit, interval)]
    counts_across_epochs = settings.evaluation.check_val_every_n_epoch is None
    if (
        any(isinstance(value, Fraction) and value.denominator != 1 for value in scaled)
        or (len(before) == 1 and isinstance(scaled[0], Fraction) and scaled[0] > after[0])
        or (len(before) > 1 and drops and after != [length * scale for length in before])
        or (counts_across_epochs and scale != 1)
    ):
        return None
    limit, interval = (int(value) if isinstance(value, Fraction) else value for value in scaled)
    return {
        "accumulate_grad_batches": division.accumulate,
        "limit_train_batches": limit,
        "val_check_interval": interval,
    }


def warn_of_restarts(run: Run, problem: str) -> None:
    """Warn once in the job that a killed rank ends the others of an elastic fit, and why."""
    if run.is_global_zero:
        _log.warning("elastic=%r: %s, so that all ranks are restarted if one dies", run.plan.elastic, problem)
