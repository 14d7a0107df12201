"""Elastic fits: ranks that go on in their processes, as fewer or more ranks, when one was killed or a new one joins."""

from __future__ import annotations

import traceback

import torch

from dstrat.interfaces.state_dict import canonical_parameters
from dstrat.launch.external import history
from dstrat.training.loops.global_batch import warn_of_restarts
from dstrat.training.loops.newcomers import GroupGrows
from dstrat.training.loops.stopping import stop_by
from dstrat.training.run import Run


def is_regrouped_after(run: Run, exception: Exception) -> bool:
    """Return whether the ranks of a run go on as another number of ranks after an exception in this one."""
    if isinstance(exception, GroupGrows):
        return True
    # A signal that waits for the end of the step ends the run.
    if not (run.is_fitting and run.plan.elastic) or run.interruption.requested:
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
    run.trainer.callbacks = list(beginning.callbacks)  # without those that setup has added, and adds again
    again = Run(run.trainer, run.stage, run.sources, previous=run)
    again.beginning = beginning
    run.trainer.run = again
    run.strategy.connect(run.module)
    return again


# The offer to the supervisor


def offer_to_go_on(run: Run) -> None:
    """Write for the supervisor, when training begins, with how many ranks it can go on."""
    if not (run.is_fitting and run.plan.elastic):
        return
    from dstrat.launch.elastic import offer_sizes

    def offer() -> None:
        problem = _why_restarted(run)
        if problem:
            warn_of_restarts(run, problem)
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
    parameters = [key for key, parameter in canonical_parameters(run.module).items() if not parameter.is_meta]
    if getattr(run.module, "strict_loading", True) and all(key in saved for key in parameters):
        return ""
    return f"the checkpoints of {name} may leave out weights, by its state_dict or strict_loading=False"


def withdraw_offer(run: Run) -> None:
    """Undo :func:`offer_to_go_on` at the end of a fit."""
    if run.is_fitting and run.plan.elastic and run.is_global_zero:
        from dstrat.launch.elastic import withdraw_sizes

        withdraw_sizes()
