"""Counters of a fit, and the per-rank state of a resume."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import reduce
from operator import add
from typing import TYPE_CHECKING, Any, Literal

import torch

from dstrat.data.epoch_reader import reshard_position
from dstrat.data.random_state import RandomState, RankRandomState
from dstrat.data.resume import share_seeds, shared_seeds
from dstrat.interfaces.state_dict import canonical_name, canonical_parameters
from dstrat.training.metrics.metric_objects import load_metric_states

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from dstrat.training.run import Run


Phase = Literal["batch_end", "validated", "done"]
"""Progress after a batch: its hooks are done, its validation is done, everything is done."""

_SAVED = (
    "epochs_done",
    "global_step",
    "batches_seen",
    "batches_done",
    "in_group",
    "group_weight",
    "group_divisor",
    "steps_before",
    "is_last_batch",
    "phase",
)


class Position:
    """The counters of a fit.

    Attributes:
        epoch: Index of the epoch, from 0.
        epochs_done: Number of epochs whose batches have all been trained on.
        global_step: Number of optimizer steps taken.
        batch_idx: Index of the current batch in the epoch.
        is_last_batch: Whether it is the last one of the epoch.
        batches_seen: Number of batches trained on in all epochs.
        batches_done: Number of batches trained on in this epoch.
        in_group: Number of batches since the last optimizer step, also of those without gradients.
        group_weight: Number of batches of which the accumulated gradients are.
        group_divisor: Number of batches expected in the current group, by which each loss of it is divided.
        steps_before: Number of optimizer steps before the current batch.
        phase: Progress after the current batch.
        is_in_batch: Whether the current batch is in progress, and not yet among ``batches_done``.
    """

    # A base class of the loop, not an attribute of it: that saves a look-up per counter in each step.
    def __init__(self) -> None:
        self.epoch = 0
        self.epochs_done = 0
        self.global_step = 0
        self.batch_idx = 0
        self.is_last_batch = False
        self.batches_seen = 0
        self.batches_done = 0
        self.in_group = 0
        self.group_weight: float = 0
        self.group_divisor: float = 1
        self.steps_before = 0
        self.phase: Phase = "done"
        self.is_in_batch = False

    def state_dict(self) -> dict[str, Any]:
        """Return the counters for a checkpoint, which are equal on all ranks."""
        return {name: getattr(self, name) for name in _SAVED} | {"is_last_batch": self.ends_epoch}

    @property
    def ends_epoch(self) -> bool:
        """Whether the epoch's last batch is done."""
        return self.is_last_batch and not self.is_in_batch

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the counters."""
        # Absent in older checkpoints, which divided by the number of batches that the interval asks for.
        of_group = {"group_weight": state["in_group"], "group_divisor": 0}
        for name in _SAVED:
            setattr(self, name, state[name] if name in state else of_group[name])
        self.epoch = self.epochs_done  # it is not saved: a checkpoint at the end of an epoch resumes with the next


@dataclass(kw_only=True, slots=True)
class Pending:
    """What a training loop has to do next, beside the batches of its epoch.

    Attributes:
        stop: Whether the training ends after this batch.
        vote: Whether the ranks vote after this batch, whenever the next vote was to be.
        newcomers: Whether the ranks leave their group after this step, for one with new processes.
        agreement_on_end: Whether the ranks agree before each batch on whether the epoch ends.
        reload_of_validation: Whether the next validation has new loaders, as the training loader was made anew.
        resume: State of a checkpoint to restore when the epoch begins or goes on.
        saved_length: Length of the training loader in that checkpoint.
        saved_samples: Number of samples in a batch of each training loader in that checkpoint; None if it is unknown.
        validation_batches: Batches of each validation loader that were seen before that checkpoint, by its index.
        readers: Numbers of readers of the data whose counters these are, and of those now, if the job has another size.
        random_state: Random state from which a checkpoint of now repeats the validation.
        logged: Logged values of the epoch that was broken off, for a resume within it.
        metrics: States of metric objects from which a checkpoint of now repeats the validation.
    """

    stop: bool = False
    vote: bool = False
    newcomers: bool = False
    agreement_on_end: bool = False
    reload_of_validation: bool = False
    resume: ResumeState | None = None
    saved_length: int | None = None
    saved_samples: list[int] | None = None
    validation_batches: dict[int, int] = field(default_factory=dict)
    readers: tuple[int, int] | None = None
    random_state: RankRandomState | None = None
    logged: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


# Per-rank state of a resume: random state, position in the data, gradients


_log = logging.getLogger(__name__)


def rank_state(
    run: Run,
    *,
    random: RankRandomState,
    logged: dict[str, Any],
    has_gradients: bool,
    weights: dict[str, float] | None,
) -> dict[str, Any]:
    """Return the state of this rank for a checkpoint, as plain values and tensors.

    Args:
        run: In a fit.
        random: The random state to resume with.
        logged: The logged values of the epoch until now.
        has_gradients: Whether gradients may be accumulated, or remain after an optimizer step.
        weights: The weights of the batches of which the accumulated gradients are; None if they have none.
    """
    loop, data = run.fit_loop, run.fit_loop.data
    # A batch in progress is repeated; if it is the first one, the resume starts the epoch again.
    in_first = loop.is_in_batch and not loop.batches_done and data.reader.beginning is not None
    items_done = 0 if _is_over(run) else loop.batches_done // data.batches_per_item
    return {
        "random": random.host.state_dict(),
        "device_random": random.device,
        **data.reader.state_dict(data.loader, items_done, starts_again=in_first),
        "validation": [shared_seeds(loader) for loader in loop.validation_loaders],
        "logged": logged,
        "gradients": _collect_gradients(run) if has_gradients else None,
        "weights": weights,
        "begun": in_first,
    }


def _is_over(run: Run) -> bool:
    """Return whether the position is between two epochs."""
    return run.fit_loop.ends_epoch or not run.fit_loop.batches_done


def _collect_gradients(run: Run) -> dict[str, Any] | None:
    strategy = run.strategy
    if strategy.saves_gradients:  # in its own rank state
        return None
    if strategy.replicates_state:
        named = canonical_parameters(strategy.module).items()
        return {name: _encode_gradient(p.grad) for name, p in named if p.grad is not None}
    manual = run.fit_loop.manual_optimization
    if run.is_global_zero and (manual is None or manual.has_gradients):
        _log.warning(
            "the checkpoint is saved between the batches of one optimizer step, and lacks their gradients, which the "
            "strategy keeps sharded: a run that continues it leaves these batches out"
        )
    return None


def _encode_gradient(gradient: Tensor) -> Tensor | dict[str, Any]:
    """Encode a gradient for a checkpoint; a sparse one, such as of an embedding, as a dict of dense tensors."""
    if not gradient.is_sparse:
        return gradient
    return {
        # Not indices() and values(): these coalesce the tensor, which adds values in another order, and rounds.
        "indices": gradient._indices(),  # noqa: SLF001 - as above
        "values": gradient._values(),  # noqa: SLF001 - the same
        "size": list(gradient.shape),
        "is_coalesced": gradient.is_coalesced(),
    }


def _decode_gradient(saved: Tensor | Mapping[str, Any]) -> Tensor:
    """Return the gradient that :func:`_encode_gradient` encoded."""
    if isinstance(saved, torch.Tensor):
        return saved
    return torch.sparse_coo_tensor(
        saved["indices"], saved["values"], saved["size"], is_coalesced=saved["is_coalesced"], check_invariants=False
    )


def reshard_rank_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state for each rank of a resume on another number of ranks, or of readers of the data.

    The order of the data and the mean of accumulated gradients do not depend on the number of ranks; random numbers and
    running means start anew.

    Args:
        states: The result of :func:`rank_state` on each rank that saved.
    """
    saved = [state["gradients"] for state in states if state["gradients"] is not None]
    gradients = [{name: _decode_gradient(value) for name, value in one.items()} for one in saved]
    names = dict.fromkeys(name for one in gradients for name in one)  # a rank lacks those of its unused parameters
    mean = {
        name: _encode_gradient(reduce(add, [one[name] for one in gradients if name in one]) / len(gradients))
        for name in names
    }
    weights = [one for state in states if (one := state.get("weights")) is not None]  # absent in older checkpoints
    mean_weights = {key: sum(one[key] for one in weights) / len(weights) for key in weights[0]} if weights else None
    nothing = dict.fromkeys(("random", "device_random", "logged"))
    of_all = {**reshard_position(states[0]), "validation": states[0].get("validation")}
    return {**nothing, **of_all, "gradients": mean or None, "weights": mean_weights}


class ResumeState:
    """The saved state of a rank, to be restored at the beginning of an epoch or within it.

    Args:
        run: In a fit.
        state: The result of :func:`rank_state` or :func:`reshard_rank_states`.

    Attributes:
        has_begun: Whether the state is of the first batch of an epoch, for which loaders had been made anew.
        batch_ratio: Number of batches, of all ranks together, that have as many samples as one of those of the ranks
            that saved.
        weights: The weights of the losses whose gradients are accumulated; None without any, or without gradients.
    """

    def __init__(self, run: Run, state: Mapping[str, Any]) -> None:
        self._run, self._state = run, state
        self.batch_ratio = 1.0
        self.has_begun: bool = state.get("begun", False)  # absent in older checkpoints
        self.weights: Mapping[str, float] | None = state.get("weights")  # the same

    def restore(self) -> None:
        """Restore random state, logged values and gradients, after the hooks at the start of the epoch."""
        run, state = self._run, self._state
        strategy = run.strategy
        if state["gradients"]:
            self._restore_gradients(state["gradients"])
        self._restore_weights()
        if state["logged"] is not None:
            run.fit_loop.logged.load_state_dict(state["logged"], strategy.module)
            load_metric_states(strategy.module, state["logged"].get("metrics", {}))  # absent in older checkpoints
        loop = run.fit_loop
        loop.data.reader.load_state_dict(
            loop.data.loader, state, epoch=loop.epoch, batches_done=loop.batches_done, is_over=_is_over(run)
        )
        for validated, seeds in zip(loop.validation_loaders, state.get("validation") or (), strict=False):
            share_seeds(validated, seeds)
        if state["device_random"] is not None:
            strategy.set_random_state(state["device_random"])
        if state["random"] is not None:  # last, as the steps above may draw numbers
            RandomState.from_state_dict(state["random"]).restore()

    def _restore_gradients(self, gradients: Mapping[str, Any]) -> None:
        """Restore accumulated gradients, to which the next backward pass adds."""
        strategy = self._run.strategy
        if strategy.replicates_state:
            saved = {canonical_name(name): gradient for name, gradient in gradients.items()}  # of older checkpoints
            for name, parameter in canonical_parameters(strategy.module).items():
                gradient = saved.get(name)
                parameter.grad = None if gradient is None else _decode_gradient(gradient).to(parameter.device)
                if parameter.grad is not None and self.batch_ratio != 1:
                    parameter.grad *= self.batch_ratio  # a sum over batches
            return
        self._run.fit_loop.group_weight, self.weights = 0, None
        if self._run.is_global_zero:
            _log.warning(
                "the checkpoint has whole gradients that were not cleared when it was saved, which are left out, as "
                "the strategy shards gradients"
            )

    def _restore_weights(self) -> None:
        loop = self._run.fit_loop
        if loop.manual_optimization is not None:
            if self.weights:
                loop.manual_optimization.load_weights_state(self.weights, self.batch_ratio)
        elif loop.group_weight:
            loop.loss_weights.load_state_dict(self.weights, self.batch_ratio)
            if loop.loss_weights.is_used is False:  # so logged values wait for none
                loop.logged.expect_weights(False)
