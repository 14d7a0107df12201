"""Elastic fits: ranks that go on in their processes, as fewer or more ranks, when one was killed or a new one joins."""

from __future__ import annotations

import copy
import logging
import traceback
import weakref
from dataclasses import replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.data.combined_loader import CombinedLoader, map_leaves
from dstrat.data.division import with_share
from dstrat.data.global_batch import batch_sizes_of, divide_global_batch, drops_samples, epoch_lengths
from dstrat.data.limits import limit_of
from dstrat.data.random_state import RandomState
from dstrat.errors import RequestError
from dstrat.launch.external import history
from dstrat.parallel.process_group import wait_for_all_ranks
from dstrat.training.loops.stopping import Votes, stop_by
from dstrat.training.metrics.metric_objects import is_metric
from dstrat.training.run import Run

if TYPE_CHECKING:
    from dstrat.data.global_batch import BatchDivision
    from dstrat.training.settings import TrainerSettings

_log = logging.getLogger(__name__)


# State of the objects of a run, to begin it again in the same process


class RunBeginning:
    """The state in which a run has begun: random numbers, and what modules, data module and callbacks have.

    A later beginning in the same process is like that in a new one: attributes that the run has set, the classes of
    modules, their submodules, parameters and buffers, hooks and which parameters are trained are as before, there are
    no gradients, and then the checkpoint's state is loaded.  Another object that was changed in place, such as a list,
    keeps its content.

    Args:
        run: A run that has not prepared anything yet.
    """

    def __init__(self, run: Run) -> None:
        self._random_state = RandomState.capture()
        objects = [*run.module.modules(), *([run.datamodule] if run.datamodule else []), *run.callbacks]
        self._attributes = [(each, dict(each.__dict__)) for each in objects]
        self._buffers = {name: buffer.clone() for name, buffer in run.module.named_buffers() if not buffer.is_meta}
        self._is_trained = {name: parameter.requires_grad for name, parameter in run.module.named_parameters()}
        self._classes = [(each, type(each)) for each in run.module.modules()]
        self._members = [
            (value, copy.copy(value))
            for each in run.module.modules()
            for name, value in vars(each).items()
            if isinstance(value, dict | set) and (name in _MEMBERS or "hooks" in name)
        ]
        self._parameters = [
            (each, {name: _FirstParameter(path, name, value) for name, value in _parameters_of(each).items()})
            for path, each in run.module.named_modules()
        ]
        self._module, self._trainer, self._callbacks = run.module, run.trainer, list(run.callbacks)

    def find_replaced_parameter(self) -> str:
        """Return the name of a parameter that cannot be what it was at the beginning; empty if there is none."""
        each = ((module, first) for module, firsts in self._parameters for first in firsts.values())
        return next((first.full_name for module, first in each if not first.is_restorable(module)), "")

    @torch.no_grad()
    def restore(self) -> None:
        """Restore random numbers, modules, attributes, buffers, hooks and trained parameters, and reset metrics."""
        self._restore_modules()
        self._trainer.callbacks = list(self._callbacks)  # without those that setup has added, and adds again
        for name, parameter in self._module.named_parameters():
            parameter.grad = None
            parameter.requires_grad_(self._is_trained.get(name, parameter.requires_grad))
        for name, buffer in self._module.named_buffers():
            value = self._buffers.get(name)
            if value is not None and value.shape == buffer.shape:  # another shape is a cache that has grown
                buffer.copy_(value)
        for layer in self._module.modules():
            if is_metric(layer):
                layer.reset()  # type: ignore[operator]  # of torchmetrics
        self._random_state.restore()

    def _restore_modules(self) -> None:
        # Found before what may hold the last reference to them is removed, such as the module of a parametrization.
        restored = [{name: first.find(module) for name, first in firsts.items()} for module, firsts in self._parameters]
        for each, attributes in self._attributes:
            each.__dict__.clear()
            each.__dict__.update(attributes)
        for module, first_class in self._classes:
            if type(module) is not first_class:  # a parametrization has made a class of its own
                module.__class__ = first_class
        for members, at_beginning in self._members:  # in place, as handles of hooks refer to these dicts
            members.clear()
            members.update(at_beginning)
        for (module, firsts), parameters in zip(self._parameters, restored, strict=True):
            _parameters_of(module).clear()
            _parameters_of(module).update(parameters)
            for first in firsts.values():
                first.restore_hooks()


_MEMBERS = {name for name, value in vars(nn.Module()).items() if isinstance(value, dict | set)} - {"_parameters"}


class _FirstParameter:
    """A parameter that a module has at the beginning, without its memory: a strategy may replace it by a shard.

    Args:
        path: Name of the module.
        name: Name of the parameter in it.
        parameter: The parameter; None of a layer without it, such as one without a bias.
    """

    def __init__(self, path: str, name: str, parameter: nn.Parameter | None) -> None:
        self.full_name = f"{path}.{name}" if path else name
        self._name, self._is_none = name, parameter is None
        self._shape = None if parameter is None or nn.parameter.is_lazy(parameter) else parameter.shape
        self._parameter = (lambda: None) if parameter is None else weakref.ref(parameter)
        self._hooks = [dict(hooks or {}) for hooks in _hooks_of(parameter)]

    def find(self, module: nn.Module) -> nn.Parameter | None:
        """Return the parameter, or the one that the module has now instead."""
        first: nn.Parameter | None = self._parameter()
        return first if first is not None or self._is_none else _parameters_of(module).get(self._name)

    def is_restorable(self, module: nn.Module) -> bool:
        """Return whether the parameter, or one of its shape in its place, exists."""
        current = self.find(module)
        return self._is_none or (current is not None and self._shape in (None, current.shape))

    def restore_hooks(self) -> None:
        """Let the parameter have the hooks of the beginning only."""
        for hooks, at_beginning in zip(_hooks_of(self._parameter()), self._hooks, strict=False):
            if hooks is not None:
                hooks.clear()
                hooks.update(at_beginning)


def _parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the dict of a module's own parameters; an empty one for a TorchScript module, which stays as it is."""
    parameters: Any = vars(module).get("_parameters")
    return parameters if isinstance(parameters, dict) else {}


def _hooks_of(parameter: nn.Parameter | None) -> list[dict[int, Any] | None]:
    """Return the hooks of a parameter's gradient."""
    if parameter is None:
        return []
    return [parameter._backward_hooks, parameter._post_accumulate_grad_hooks]  # noqa: SLF001 - torch has no public names


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


def begin_again(run: Run) -> Run | None:
    """Wait for the supervisor, and return the run of this process as a rank of the next group.

    It returns None where there is none, and the supervisor ends this process.
    """
    beginning = run.beginning
    if beginning is None or beginning.find_replaced_parameter():  # by a hook that came after the offer
        return None
    from dstrat.launch.elastic import join_group

    if run.interruption.requested:  # a signal that came after the last vote, and is forgotten otherwise
        stop_by(run.interruption.requested)
    if not join_group():
        return None
    beginning.restore()
    again = Run(run.trainer, run.stage, run.sources, previous=run)
    again.beginning = beginning
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
    started = run.plan.world_size
    run.sizes = [ranks for ranks in range(1, started + 1) if _divide(run, settings, loader, ranks) is not None]
    if run.world_size == started:
        if len(run.sizes) <= 1 < started:
            _warn_of_restarts(run, "with this loader and these settings, fewer ranks cannot train on the same samples")
        return loader
    divided = _divide(run, settings, loader, run.world_size)
    if divided is None:
        raise RequestError(
            f"the batches of a step on {started} ranks cannot be divided evenly over the {run.world_size} that remain: "
            "choose a batch_size that has more divisors"
        )
    division, of_fewer = divided
    if run.is_global_zero:
        _log.warning(
            "%d of %d ranks train: the samples of a step stay the same, in %d batches of %s samples on each rank",
            run.world_size,
            started,
            division.accumulate,
            " and ".join(str(int(size * division.share)) for size in batch_sizes_of(loader) or ()),
        )
    run.user_settings = settings
    run.trainer.settings = of_fewer
    if isinstance(loader, CombinedLoader):
        return CombinedLoader(map_leaves(loader.iterables, lambda leaf: with_share(leaf, division.share)), loader.mode)
    return map_leaves(loader, lambda leaf: with_share(leaf, division.share))


def _divide(
    run: Run, settings: TrainerSettings, loader: Any, ranks: int
) -> tuple[BatchDivision, TrainerSettings] | None:
    """Return the division of a step over a number of ranks, and its settings; None if samples or steps would differ."""
    sizes, started = batch_sizes_of(loader), run.plan.world_size
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
) -> TrainerSettings | None:
    """Return the settings with numbers of batches for smaller ones; None if they are no whole numbers.

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
    scaled = [
        value * scale if isinstance(value, int) and not isinstance(value, bool) else value
        for value in (limit, interval)
    ]
    counts_across_epochs = settings.evaluation.check_val_every_n_epoch is None
    if (
        any(isinstance(value, Fraction) and value.denominator != 1 for value in scaled)
        or (len(before) == 1 and isinstance(scaled[0], Fraction) and scaled[0] > after[0])
        or (len(before) > 1 and drops and after != [length * scale for length in before])
        or (counts_across_epochs and scale != 1)
    ):
        return None
    limit, interval = (int(value) if isinstance(value, Fraction) else value for value in scaled)
    return replace(
        settings,
        steps=replace(settings.steps, accumulate_grad_batches=division.accumulate),
        data=replace(settings.data, limit_train_batches=limit),
        evaluation=replace(settings.evaluation, val_check_interval=interval),
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
    replaced = "" if run.beginning is None else run.beginning.find_replaced_parameter()
    if replaced:
        return (
            f"{name} has replaced its parameter {replaced!r} since the beginning of the fit, as setup or "
            "configure_model may do, and they cannot be called again"
        )
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
