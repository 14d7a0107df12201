"""Elastic fits: ranks that go on in their processes, as fewer or more ranks, when one was killed or a new one joins."""

from __future__ import annotations

import logging
import traceback
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from dstrat.data.combined_loader import CombinedLoader, map_leaves
from dstrat.data.division import with_share
from dstrat.data.global_batch import batch_sizes_of, divide_global_batch
from dstrat.data.random_state import RandomState
from dstrat.errors import RequestError
from dstrat.launch.external import history
from dstrat.parallel.process_group import wait_for_all_ranks
from dstrat.training.loops.stopping import Votes, stop_by
from dstrat.training.metrics.metric_objects import is_metric
from dstrat.training.run import Run

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.data.global_batch import BatchDivision
    from dstrat.training.settings import TrainerSettings

_log = logging.getLogger(__name__)


# State of the objects of a run, to begin it again in the same process


class RunBeginning:
    """The state in which a run has begun: random numbers, and what modules, data module and callbacks have.

    A later beginning in the same process is like that in a new one: attributes that the run has set, buffers, hooks and
    which parameters are trained are as before, there are no gradients, and then the checkpoint's state is loaded.
    Another object that was changed in place, such as a list, keeps its content.

    Args:
        run: A run that has not prepared anything yet.
    """

    def __init__(self, run: Run) -> None:
        self._random_state = RandomState.capture()
        objects = [*run.module.modules(), *([run.datamodule] if run.datamodule else []), *run.callbacks]
        self._attributes = [(each, dict(each.__dict__)) for each in objects]
        self._buffers = {name: buffer.clone() for name, buffer in run.module.named_buffers() if not buffer.is_meta}
        self._is_trained = {name: parameter.requires_grad for name, parameter in run.module.named_parameters()}
        hooks = (value for each in run.module.modules() for name, value in vars(each).items() if "hooks" in name)
        self._hooks = [(value, dict(value)) for value in hooks if isinstance(value, dict)]
        self._module = run.module

    @torch.no_grad()
    def restore(self) -> None:
        """Restore random numbers, attributes, buffers, hooks and frozen parameters, and reset metric objects."""
        for each, attributes in self._attributes:
            each.__dict__.clear()
            each.__dict__.update(attributes)
        for hooks, at_beginning in self._hooks:  # in place, as their handles refer to these dicts
            hooks.clear()
            hooks.update(at_beginning)
        for name, parameter in self._module.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(self._is_trained.get(name, parameter.requires_grad))
        for name, buffer in self._module.named_buffers():
            first = self._buffers.get(name)
            if first is not None and first.shape == buffer.shape:  # another shape is a cache that has grown
                buffer.copy_(first)
        for layer in self._module.modules():
            if is_metric(layer):
                layer.reset()  # type: ignore[operator]  # of torchmetrics
        self._random_state.restore()


class GroupGrows(Exception):  # noqa: N818 - no error
    """The ranks have saved a checkpoint, from which they go on together with new ones."""


def is_regrouped_after(run: Run, exception: Exception) -> bool:
    """Return whether the ranks of a run go on as another number of ranks after an exception in this one."""
    if isinstance(exception, GroupGrows):
        return True
    # A signal that waits for the end of the step ends the run.
    if not (run.is_fitting and run.settings.output.elastic) or run.interruption.requested:
        return False
    from dstrat.launch.elastic import wait_for_regrouping
    from dstrat.launch.failures import kind_of

    # An error of another kind may follow from the lost connection too.
    return wait_for_regrouping(is_expected=kind_of(exception) != "error")


def release_frames(exception: BaseException) -> None:
    """Release what the frames of an exception hold: iterators of loaders, wrappers of the module, tensors."""
    link: BaseException | None = exception
    seen: set[int] = set()
    while link is not None and id(link) not in seen:
        seen.add(id(link))
        traceback.clear_frames(link.__traceback__)
        link = link.__context__ if link.__cause__ is None else link.__cause__


def begin_again(run: Run, beginning: RunBeginning) -> Run | None:
    """Wait for the supervisor, and return the run of this process as a rank of the next group.

    It returns None where there is none, and the supervisor ends this process.
    """
    from dstrat.launch.elastic import join_group

    if run.interruption.requested:  # a signal that came after the last vote, and is forgotten otherwise
        stop_by(run.interruption.requested)
    if not join_group():
        return None
    beginning.restore()
    again = Run(run.trainer, run.stage, run.sources, previous=run)
    run.trainer.run = again
    run.strategy.connect(run.module)
    return again


# New ranks


def newcomers_wait(run: Run) -> bool:
    """Return whether new processes wait to take the places of ranks that were killed."""
    if run.settings.output.elastic != "replace":
        return False
    from dstrat.launch.elastic import has_newcomers

    return has_newcomers()


def admit_newcomers(run: Run) -> None:
    """Save a checkpoint in memory between two steps, and leave the group, for one with new ranks; collective.

    Raises:
        GroupGrows: The checkpoint is complete.
    """
    callback: Any = next(callback for callback in run.callbacks if callback.saves_in_memory)
    callback.save_now(run.trainer)
    # A signal that has arrived meanwhile comes first.
    (signal,) = Votes(run.strategy, beat=run.beat).take(0, run.interruption.requested)
    if signal:
        stop_by(signal)
    wait_for_all_ranks("save a checkpoint for new ranks")  # Gloo fails in a rank that communicates when another leaves
    raise GroupGrows("the ranks have left their group for one with new processes, and none was formed in time")


# The global batch


def keep_global_batch(run: Run, loader: Any) -> Any:
    """Return the user's training loader, with smaller batches where fewer ranks train than were started.

    Then the Trainer's settings have, until the end of the run, as many accumulated batches as make an optimizer step of
    the same samples.

    Raises:
        RequestError: The samples cannot be divided.
    """
    if not (run.is_fitting and run.settings.output.elastic):
        cluster = run.strategy.components.cluster_environment
        if run.is_fitting and cluster is not None and cluster.num_started > cluster.world_size and run.is_global_zero:
            _log.warning(
                "%d of %d ranks train, as others were killed in an earlier fit: each step has fewer samples",
                cluster.world_size,
                cluster.num_started,
            )
        return loader
    settings = run.settings if run.user_settings is None else run.user_settings
    sizes, started = batch_sizes_of(loader), run.plan.world_size
    run.sizes = [size for size in range(1, started + 1) if _divide(run, settings, sizes, size) is not None]
    if run.world_size == started:
        if len(run.sizes) <= 1 < started:
            _warn_of_restarts(run, "with this loader and these settings, fewer ranks cannot train on the same samples")
        return loader
    division = _divide(run, settings, sizes, run.world_size)
    if division is None or sizes is None:
        raise RequestError(
            f"the batches of a step on {started} ranks cannot be divided evenly over the {run.world_size} that remain: "
            "choose a batch_size that has more divisors"
        )
    if run.is_global_zero:
        _log.warning(
            "%d of %d ranks train: the samples of a step stay the same, in %d batches of %s samples on each rank",
            run.world_size,
            started,
            division.accumulate,
            " and ".join(str(int(size * division.share)) for size in sizes),
        )
    run.user_settings = settings
    run.trainer.settings = _divided(settings, division)
    if isinstance(loader, CombinedLoader):
        return CombinedLoader(map_leaves(loader.iterables, lambda leaf: with_share(leaf, division.share)), loader.mode)
    return map_leaves(loader, lambda leaf: with_share(leaf, division.share))


def _divide(run: Run, settings: TrainerSettings, sizes: Sequence[int] | None, ranks: int) -> BatchDivision | None:
    """Return the division of a step over a number of ranks; None where there is none with the same samples."""
    accumulate = settings.steps.accumulate_grad_batches
    is_divided = settings.data.use_distributed_sampler and not any(
        hasattr(callback, "get_accumulate_grad_batches") for callback in run.callbacks
    )
    if sizes is None or not is_divided:
        return None
    division = divide_global_batch(
        sizes,
        accumulate=accumulate,
        ranks=run.plan.world_size,
        fewer=ranks,
        accumulates=run.module.automatic_optimization,
    )
    if division is None:
        return None
    values = (settings.data.limit_train_batches, settings.evaluation.val_check_interval)
    counts = [value for value in values if isinstance(value, int) and not isinstance(value, bool)]
    if any(count * division.accumulate % accumulate for count in counts):
        return None
    counts_across_epochs = settings.evaluation.check_val_every_n_epoch is None
    return None if counts_across_epochs and division.accumulate != accumulate else division


def _divided(settings: TrainerSettings, division: BatchDivision) -> TrainerSettings:
    """Return the settings with numbers of batches for smaller ones."""
    accumulate = settings.steps.accumulate_grad_batches

    def scaled(count: Any) -> Any:
        is_count = isinstance(count, int) and not isinstance(count, bool)
        return count * division.accumulate // accumulate if is_count else count

    return replace(
        settings,
        steps=replace(settings.steps, accumulate_grad_batches=division.accumulate),
        data=replace(settings.data, limit_train_batches=scaled(settings.data.limit_train_batches)),
        evaluation=replace(settings.evaluation, val_check_interval=scaled(settings.evaluation.val_check_interval)),
    )


def offer_to_go_on(run: Run) -> None:
    """Write for the supervisor, when training begins, with how many ranks it can go on."""
    if not (run.is_fitting and run.settings.output.elastic):
        return
    from dstrat.launch.elastic import offer_sizes

    def offer() -> None:
        problem = _why_restarted(run)
        if problem:
            _warn_of_restarts(run, problem)
        elif run.is_global_zero:
            offer_sizes(run.sizes, history.current_launch)

    run.hooks.insert("on_train_start", offer)


def _why_restarted(run: Run) -> str:
    """Return why a fit cannot go on with fewer ranks, other than by its batches; empty if it can; collective."""
    name = type(run.module).__name__
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in run.strategy.optimizers):
        return "LBFGS computes the loss of a batch several times in a step, and cannot accumulate batches"
    if run.strategy.replicates_state:
        return ""
    # A rank with shards loses those of the rank that died, and has all values from the checkpoint.
    saved = run.strategy.sharded_module_state()
    parameters = [key for key, parameter in run.module.named_parameters() if not parameter.is_meta]
    if getattr(run.module, "strict_loading", True) and all(key in saved for key in parameters):
        return ""
    return f"the checkpoints of {name} may leave out weights, by its state_dict or strict_loading=False"


def _warn_of_restarts(run: Run, problem: str) -> None:
    if run.is_global_zero:
        _log.warning(
            "elastic=%r: %s, so that all ranks are restarted if one dies", run.settings.output.elastic, problem
        )


def withdraw_offer(run: Run) -> None:
    """Undo :func:`offer_to_go_on` at the end of a fit."""
    if run.is_fitting and run.settings.output.elastic and run.is_global_zero:
        from dstrat.launch.elastic import withdraw_sizes

        withdraw_sizes()
