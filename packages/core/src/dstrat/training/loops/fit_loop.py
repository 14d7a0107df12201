"""The training loop: epochs, batches, validation and stopping."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

from torch import Tensor
from typing_extensions import override

from dstrat.data.epoch_reader import has_shared_order
from dstrat.data.random_state import RandomState, RankRandomState
from dstrat.data.resume import convert_position
from dstrat.data.samplers import set_epoch
from dstrat.errors import MisuseError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.optimizers import Optimization
from dstrat.parallel.loss_weights import LossWeights
from dstrat.training.hooks import hook_of
from dstrat.training.loops.batches import TrainingData
from dstrat.training.loops.compiled import CompiledOptimization
from dstrat.training.loops.manual_optimization import ManualOptimization
from dstrat.training.loops.newcomers import admit_newcomers, newcomers_wait
from dstrat.training.loops.optimization import AutomaticOptimization, NewOptimizers
from dstrat.training.loops.position import Pending, Position, ResumeState, rank_state
from dstrat.training.loops.schedules import SchedulerSteps, ValidationSchedule
from dstrat.training.loops.steps import count_arguments, describe_peers
from dstrat.training.loops.stopping import Votes, stop_by
from dstrat.training.metrics.logged import LoggedValues
from dstrat.training.metrics.metric_objects import load_metric_states, metric_states
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from torch.optim import Optimizer

    from dstrat.training.loops.evaluation_loop import EvaluationLoop
    from dstrat.training.run import Run
    from dstrat.training.settings import RunLimits


_log = logging.getLogger(__name__)


class FitLoop(Position):
    """The loop that trains a module over the batches of a loader, epoch after epoch.

    Attributes:
        pending: What the loop has to do next beside its batches.
        data: The training data of this process.
        logged: The values that the module logs in training.
        loss_weights: The weights of the losses since the last optimizer step, in a run.
        ended_by_hook: Whether ``on_train_batch_start`` has ended the current epoch, before its validation.
    """

    loss_weights: LossWeights
    ended_by_hook = False
    _logs_by_batches = False
    _has_warned_of_no_step = False
    _publishes: bool

    def __init__(self, run: Run) -> None:
        super().__init__()
        self._run = run
        self.data = TrainingData(run)
        self.logged = LoggedValues(training=True)
        self._optimization: AutomaticOptimization | ManualOptimization | CompiledOptimization | None = None
        self._optimizers: list[Optimizer] = []  # those that are stepped
        self.pending = Pending()
        self._has_skipped = False

    # Properties

    @property
    def finished(self) -> bool:
        """Whether ``max_epochs`` or ``max_steps`` is reached."""
        return 0 <= self._limits.max_epochs <= self.epochs_done or self._steps_done

    @property
    def _steps_done(self) -> bool:
        return 0 <= self._limits.max_steps <= self.global_step

    @property
    def _limits(self) -> RunLimits:
        return self._run.settings.limits  # which a callback may change

    @property
    def max_epochs(self) -> int:
        """The Trainer's, which may be set here too, as in Lightning."""
        return self._limits.max_epochs

    @max_epochs.setter
    def max_epochs(self, value: int) -> None:
        self._run.trainer.max_epochs = value

    @property
    def _wants_to_stop(self) -> bool:
        """Whether ``should_stop`` is set in this process, after ``min_epochs`` and ``min_steps``."""
        limits = self._limits
        enough = self.epochs_done >= limits.min_epochs and self.global_step >= limits.min_steps
        return self._run.should_stop and enough

    @property
    def manual_optimization(self) -> ManualOptimization | None:
        """The manual optimization; None in automatic optimization."""
        return self._optimization if isinstance(self._optimization, ManualOptimization) else None

    def require_manual(self, caller: str) -> ManualOptimization:
        """Return the manual optimization, for a method of the module that needs it.

        Raises:
            MisuseError: The module is optimized automatically.
        """
        manual = self.manual_optimization
        if manual is None:
            raise MisuseError(
                f"{caller} is for manual optimization, and {type(self._run.module).__name__} is optimized "
                "automatically: set self.automatic_optimization = False in its __init__, or return the loss from "
                "training_step"
            )
        return manual

    @property
    def validation_loaders(self) -> list[Any]:
        """The validation loaders of this process; empty without validation."""
        return [] if self._run.evaluation_loop is None else self._run.evaluation_loop.loaders

    @property
    def logged_step(self) -> int:
        """The step of values in loggers: of the optimizer, or batches where the module steps optimizers of its own."""
        return self.batches_seen if self._logs_by_batches else self.global_step

    # The run

    def setup(self) -> None:
        """Prepare the training of the module, after the strategy's setup."""
        run, module = self._run, self._run.module
        self.loss_weights = LossWeights(run.strategy)
        compiled = run.strategy.compiled_steps()
        self.logged.expect_weights(compiled is None and module.automatic_optimization)
        if compiled is not None and compiled.optimizer_steps:
            self._optimization = CompiledOptimization(run, compiled)
        elif module.automatic_optimization:
            self._optimization = AutomaticOptimization(run)
        else:
            self._optimization = ManualOptimization(run)
        self._schedulers = SchedulerSteps(run)
        self._optimizers = list(run.strategy.optimizers)
        # Nothing would be logged per step where the module steps optimizers that the Trainer does not know.
        self._logs_by_batches = self.manual_optimization is not None and not self._optimizers
        if self._logs_by_batches and run.is_global_zero:
            _log.warning(
                "configure_optimizers of %s returned no optimizer, so that global_step stays %d: values are logged "
                "with the number of batches, and max_steps and every_n_train_steps have no effect",
                type(module).__name__,
                self.global_step,
            )

    def run(self) -> None:
        """Train until ``max_epochs`` or ``max_steps`` is reached, or ``should_stop`` or a signal stops the training."""
        run = self._run
        if run.evaluation_loop is not None:
            run.evaluation_loop.batches_seen.update(self.pending.validation_batches)
        self.data.open()
        if self.pending.readers is not None:  # only now, as the length of this rank's loader is known
            self._scale_position(*self.pending.readers)
        self.data.check_position(self.batches_done)
        if isinstance(self._optimization, CompiledOptimization):
            self._optimization.check_position()
        self._schedule = ValidationSchedule(run, self.data.num_batches)
        self._votes = Votes(run.strategy, self.batches_seen, beat=run.beat)
        self.pending.agreement_on_end = self._must_agree_on_end()
        run.log_to(self.logged)
        self.logged.start_epoch()  # values that on_train_start logs belong to the first epoch
        run.hooks.call("on_train_start")
        _warn_of_evaluation_mode(run.module)
        # A checkpoint of the last batch may have been saved before what follows that batch, such as the epoch's end.
        is_between_hooks = self.phase != "done" and self._steps_done
        if self.finished and not is_between_hooks and run.is_global_zero:
            _log.warning(
                "nothing is left to train: %d of max_epochs=%d epochs and %d of max_steps=%d steps are done",
                self.epochs_done,
                self._limits.max_epochs,
                self.global_step,
                self._limits.max_steps,
            )
        with run.interruption:
            self.pending.stop = self._decide()
            while not ((self.finished and not is_between_hooks) or self.pending.stop or self.data.num_batches == 0):
                is_between_hooks = False
                self._run_epoch()
                self.pending.stop = self.pending.stop or self._decide()
        run.hooks.call("on_train_end")

    def _scale_position(self, saved_readers: int, readers: int) -> None:
        """Convert the counters of batches of another number of readers, which had other shares of the data."""
        pending = self.pending
        if self.data.length and pending.saved_length:
            done, ratio = convert_position(
                self.batches_done,
                saved_length=pending.saved_length,
                saved_readers=saved_readers,
                length=self.data.length,
                readers=readers,
                saved_samples=pending.saved_samples,
                samples=self.data.samples_per_batch,
            )
            self.batches_done = done - done % self.data.batches_per_item
            if pending.resume is not None:
                pending.resume.batch_ratio = float(ratio)
                self.group_weight *= float(ratio)
        pending.readers = None

    def _run_epoch(self) -> None:
        run, hooks = self._run, self._run.hooks
        continuation, goes_on = self.pending.resume, self.batches_done > 0
        set_epoch(self.data.loader, self.epoch)
        if continuation is not None and not goes_on:
            continuation.restore()  # saved between epochs, before a reload and the hook, which may draw random numbers
        if not goes_on and not (continuation is not None and continuation.has_begun):
            self._reload_when_due()
        self.ended_by_hook = False
        self.logged.start_epoch()
        hooks.call("on_train_epoch_start")
        if continuation is not None and goes_on:
            # After the hook: the saved random state is of the middle of the epoch, when the hook had been called.
            continuation.restore()
        self._look_up()
        self.logged.in_step = True
        completed = self._train_batches()
        self.is_in_batch = False
        self.logged.batch, self.logged.in_step = None, False  # in this order: values that wait get the batch's weight
        if completed:
            if not self.global_step and run.is_global_zero:
                self._warn_of_no_step()
            self.epochs_done, self.batches_done = self.epoch + 1, 0
        else:
            self.pending.logged = self._logged_state()  # for a resume within the epoch; the publication resets it
        run.publisher.publish_epoch(self.logged, hooks.early("on_train_epoch_end"))
        if completed:
            self._schedulers.after_epoch(self.epochs_done)  # which may monitor a value of the publication
        self.logged.reset_metrics()  # late hooks save checkpoints, from which the next epoch starts
        for hook in hooks.late("on_train_epoch_end"):
            hook()
        self.epoch = self.epochs_done  # after the hooks, for which the epoch is the one that has ended

    def _warn_of_no_step(self) -> None:
        """Warn after an epoch in which the module has stepped no optimizer of the Trainer."""
        if self.manual_optimization is not None and not self._logs_by_batches and self.batches_done:
            if self._has_warned_of_no_step:
                return
            self._has_warned_of_no_step = True
            _log.warning(
                "no optimizer of self.optimizers() has stepped in epoch %d of %s, so that global_step is 0: no step "
                "values are logged, and max_steps and every_n_train_steps have no effect; call its step, rather than "
                "that of the torch optimizer",
                self.epoch,
                type(self._run.module).__name__,
            )

    def _reload_when_due(self) -> None:
        num_batches = self.data.num_batches
        if self.data.reload_when_due(self.epoch):
            if self.data.num_batches != num_batches:
                self._schedule = ValidationSchedule(self._run, self.data.num_batches)
            self.pending.reload_of_validation = self._run.evaluation_loop is not None
            set_epoch(self.data.loader, self.epoch)

    def _train_batches(self) -> bool:
        """Train on the remaining batches of an epoch; return whether the epoch was completed."""
        run, logged, votes, interruption = self._run, self.logged, self._votes, self._run.interruption
        # A rank that is alone votes too where new processes may join it.
        is_alone = run.world_size == 1 and run.plan.elastic != "replace"
        is_timed = self._schedule.is_timed
        batch_start = run.hooks.of("on_train_batch_start")
        must_agree = self.pending.agreement_on_end
        batches = self._batches()
        if self.phase != "done":  # the checkpoint was saved between a batch and what follows it
            self._follow_up()
            self.pending.stop = self._decide()
            if self.pending.stop or self._steps_done:
                return self.is_last_batch
        indices = itertools.count(self.batches_done, self.data.batches_per_item)
        for batch_idx, (batch, is_last) in zip(indices, batches, strict=False):  # indices are endless
            self.is_in_batch, self.batch_idx, self.is_last_batch, logged.batch = True, batch_idx, is_last, batch
            if batch_start or must_agree:
                is_over = batch is not None and -1 in [hook(batch, batch_idx) for hook in batch_start]
                if self._agree_on_end(is_over) if must_agree else is_over:
                    self.ended_by_hook = True
                    break
            self._train_batch(batch, batch_idx, is_last=is_last)
            self._follow_up()
            # A signal reaches the ranks of a job at different batches: they decide together, after the batch that the
            # last vote has set.
            if is_alone:
                is_due = interruption.requested or run.should_stop or is_timed
            else:
                is_due = self.pending.vote or self.batches_seen >= votes.next_at
            if is_due:
                self.pending.stop = self._decide_after_batch()
            if self.pending.stop or 0 <= run.settings.limits.max_steps <= self.global_step:
                return is_last
        return True

    def _batches(self) -> Iterable[tuple[Any, bool]]:
        """Return the remaining batches of the epoch on the device, each with whether it is the last."""
        if self.data.reader.beginning is None or not self.batches_done:
            self.batches_done = self.in_group = 0
        if not self.in_group:
            self.group_weight = 0
        self.pending.resume = None
        self.group_divisor = self.group_divisor or self._accumulate  # 0 in checkpoints that lack it
        if isinstance(self._optimization, AutomaticOptimization):
            # Without a weight, gradients are of the last epoch, which on_train_batch_start has ended within a group.
            self._optimization.start_group(keeps_gradients=self.group_weight > 0)
        return self.data.batches(done=self.batches_done, is_over=self.is_last_batch)

    def _look_up(self) -> None:
        """Look up once per epoch what every batch needs: attribute look-ups per batch cost measurable time."""
        run = self._run
        if not isinstance(self._optimization, CompiledOptimization):
            self._optimization.look_up()  # type: ignore[union-attr]  # setup made it
        if run.evaluation_loop is not None and self._schedule.settings is not run.settings.evaluation:
            self._schedule = ValidationSchedule(run, self.data.num_batches)
        self._takes_index = count_arguments(run.module.training_step) > 1
        self._is_compiled = isinstance(self._optimization, CompiledOptimization)
        self._accumulate = 1 if self._is_compiled else run.settings.steps.accumulate_grad_batches
        self._batch_end = run.hooks.of("on_train_batch_end")
        # Also without loggers if there are several ranks: callbacks read values of sync_dist=True, reduced then.
        self._publishes = bool(run.settings.output.log_every_n_steps and (run.loggers or run.world_size > 1))
        self._profiler_step = run.profiler.step if run.profiler else None

    def _train_batch(self, batch: Any, batch_idx: int, *, is_last: bool) -> None:
        if self._run.strategy.optimizers != self._optimizers:
            self._take_new_optimizers()
        if not self.in_group:
            if not self._is_compiled:  # a callback may have changed it since the last group
                self._accumulate = self._run.settings.steps.accumulate_grad_batches
            self.group_divisor = 1 if self._accumulate == 1 else self._group_size()
        in_group = self.in_group + 1
        applies = in_group >= self._accumulate or is_last  # more, if a resumed run accumulates fewer
        self.steps_before = self.global_step
        arguments = (batch, batch_idx) if self._takes_index else (batch,)
        outputs = None
        if batch is None:
            self._skip_batch(applies=applies)
        else:
            outputs = self._optimization.run(arguments, applies=applies)  # type: ignore[union-attr]  # setup made it
        self.in_group = 0 if applies else in_group
        self.batches_seen += self.data.batches_per_item
        self.batches_done += self.data.batches_per_item
        self.is_in_batch = False  # a checkpoint that is saved from here on does not repeat the batch
        if self._schedulers.step_with_batches and self.global_step != self.steps_before:
            self._schedulers.after_step(self.global_step)
        if self._batch_end:
            self.phase = "batch_end"  # a hook may save a checkpoint, whose resume begins with _follow_up
            if batch is not None:
                outputs = _outputs_for_hooks(outputs)
            for hook in self._batch_end:
                hook(outputs, batch, batch_idx)

    def _take_new_optimizers(self) -> None:
        """Go on with the optimizers that a callback has set in place of those of ``configure_optimizers``.

        Raises:
            MisuseError: The strategy has prepared the former ones for a whole training.
        """
        run, strategy = self._run, self._run.strategy
        if not strategy.allows_new_optimizers or isinstance(self._optimization, CompiledOptimization):
            raise MisuseError(
                f"strategy.optimizers was set in a fit, and {type(strategy).__name__} trains with the optimizers of "
                "configure_optimizers to its end: change their param_groups, or begin another fit with the weights"
            )
        optimization = Optimization(optimizers=tuple(strategy.optimizers), schedulers=tuple(strategy.lr_schedulers))
        strategy.setup_optimizers(NewOptimizers(run.settings.steps, optimization))
        self._optimizers = list(strategy.optimizers)
        if isinstance(self._optimization, ManualOptimization):
            self._optimization = ManualOptimization(run)
        else:
            self._optimization = AutomaticOptimization(run)
            self._optimization.start_group(keeps_gradients=self.in_group > 0)
        self._schedulers = SchedulerSteps(run)
        self._look_up()

    def _skip_batch(self, *, applies: bool) -> None:
        """Skip a batch that is None, for example from a ``collate_fn`` without a usable sample.

        Raises:
            MisuseError: There are several ranks, or jobs that train together: the others would wait for the gradients.
        """
        if peers := describe_peers(self._run.strategy):
            raise MisuseError(
                f"the training loader gave None as batch {self.batch_idx} {peers} would wait for its gradients; let "
                "collate_fn return a batch"
            )
        if not self._has_skipped:
            self._has_skipped = True
            _log.warning(
                "the training loader gave None as batch %d: such batches are left out, and are no step of optimizer or "
                "schedulers",
                self.batch_idx,
            )
        if isinstance(self._optimization, AutomaticOptimization):
            self._optimization.skip_batch(applies=applies)

    def _follow_up(self) -> None:
        """Publish, validate and step schedulers after a batch and its hooks."""
        has_stepped = self.global_step != self.steps_before
        if self.phase != "validated":  # a resumed checkpoint may have been saved at the end of this validation
            if self._publishes and (has_stepped or self._logs_by_batches):
                every = self._run.settings.output.log_every_n_steps
                now, before = self.global_step, self.steps_before
                if self._logs_by_batches:
                    now, before = self.batches_seen, self.batches_seen - self.data.batches_per_item
                if now // every != before // every:  # a batch may take several steps
                    self._run.publisher.publish_step(self.logged)
            if self._run.evaluation_loop is not None:
                self._validate_when_due(self._run.evaluation_loop)
        if has_stepped and self._schedulers.step_with_batches:
            self._schedulers.after_validation(self.global_step)
        if self._profiler_step is not None:
            self._profiler_step()
        self.phase = "done"

    def _group_size(self) -> int:
        """Return the number of batches that are expected to accumulate into the step that begins with this one.

        The last group of an epoch may be smaller.  Where fewer batches have a gradient than expected, as in the last
        group of a loader without a length, the gradients are scaled before the step.
        """
        if self.data.num_batches is None:
            return self._accumulate
        return min(self._accumulate, self.data.num_batches - self.batches_done)

    # Validation and stopping

    def _must_agree_on_end(self) -> bool:
        """Return whether ``on_train_batch_start`` of any rank may end the epoch; collective."""
        run = self._run
        if run.world_size == 1:
            return False
        # It may differ between ranks: callbacks may exist on rank 0 only.
        answering = run.hooks.answering("on_train_batch_start")
        if answering and run.is_global_zero:
            _log.warning(
                "on_train_batch_start of %s may return -1, so that the processes communicate before every batch: "
                "annotate it with '-> None' if it does not",
                " and ".join(answering),
            )
        return run.strategy.reduce_boolean_decision(bool(answering), all=False)

    def _agree_on_end(self, is_over: bool) -> bool:
        """Return whether ``on_train_batch_start`` of any rank ends the epoch; collective."""
        strategy = self._run.strategy
        ends = strategy.reduce_boolean_decision(is_over, all=False)
        if ends and not is_over:
            _log.warning(
                "epoch %d ends before batch %d on rank %d too, as on_train_batch_start of another rank returned -1",
                self.epoch,
                self.batch_idx,
                strategy.global_rank,
            )
        return ends

    def _validate_when_due(self, validation: EvaluationLoop) -> None:
        if self._schedule.is_due(
            batches_done=self.batches_done,
            is_last=self.is_last_batch,
            epoch=self.epoch,
            batches_seen=self.batches_seen,
            batches=self.data.batches_per_item,
        ):
            # A checkpoint that is saved during the validation repeats it when it is resumed, with its random state.
            self.phase = "batch_end"
            random_state = self.pending.random_state = RankRandomState.capture(self._run.strategy)
            try:
                self._validate(validation, frees_gradients=self.in_group == 0 and self.manual_optimization is None)
            except BaseException:  # a signal too, after which a checkpoint is saved
                self.phase = "batch_end"
                random_state.restore(self._run.strategy)
                raise
            finally:
                self.pending.random_state = None
            self.phase = "validated"

    def _note_validated(self) -> None:
        """Let a checkpoint that is saved at the end of validation resume after it."""
        if self.pending.random_state is not None:
            self.phase, self.pending.random_state = "validated", None
        self.pending.metrics = None

    def _validate(self, validation: EvaluationLoop, *, frees_gradients: bool = False) -> None:
        # Just before it, as in Lightning: making a loader may draw random numbers.
        if self.pending.reload_of_validation:
            self.pending.reload_of_validation = False
            validation.load(self._run.sources.loader("val", may_be_none=True))
        if frees_gradients:  # the next batch clears them anyway; freed now, they leave memory to the validation
            hook_of(self._run.module, "on_validation_model_zero_grad", TrainModule)()
        self.data.reader.record_position()  # of training, as validation may read the same dataset
        # A validation that does not reach its end begins again: without what it has added to metric objects.
        metrics = self.pending.metrics = self._metric_states()
        try:
            validation.run(before_end=self._note_validated)
        except BaseException:
            if self.pending.metrics is not None:
                load_metric_states(self._run.strategy.module, metrics)
            raise
        finally:
            self.pending.metrics = None
        self._schedule.note_run()
        self._run.log_to(self.logged)
        self.pending.vote = True  # a callback, perhaps of one rank only, may have set should_stop

    def _decide(self) -> bool:
        """Vote with the other ranks on signals, stopping and timed validation; return whether training stops."""
        self.pending.vote = False
        validation = self._run.evaluation_loop
        clock = validation is not None and self._schedule.time_is_up
        wishes = (self._run.interruption.requested, self._wants_to_stop, clock, newcomers_wait(self._run))
        signal, stop, validate, newcomers = self._votes.take(self.batches_seen, *wishes)
        self.pending.newcomers = self.pending.vote = bool(newcomers)  # after each batch, until they are ranks
        if signal:
            stop_by(signal)
        if validate and validation is not None:
            self._validate(validation)
            return bool(stop) or self._decide()  # again, as the validation may have set should_stop
        return bool(stop)

    def _decide_after_batch(self) -> bool:
        """Vote as :meth:`_decide`; where new processes wait, leave the group for one with them after an optimizer step.

        Raises:
            GroupGrows: The ranks leave their group.
        """
        stop = self._decide()
        if self.pending.newcomers and not (stop or self._steps_done):
            # At the end of an epoch its values would be lost, which the other ranks of the next group do not have.
            ends_epoch = self.is_last_batch and self.batches_done > self._accumulate  # it has several steps
            if not (self.in_group or ends_epoch):
                admit_newcomers(self._run)
        return stop

    # State

    @override
    def state_dict(self) -> dict[str, Any]:
        validation = self._run.evaluation_loop
        counts = (
            [] if validation is None else [validation.batches_seen[index] for index in range(len(validation.loaders))]
        )
        return super().state_dict() | {
            "loader_length": self.data.length,
            "samples_per_batch": self.data.samples_per_batch,
            "validation_batches": counts,
        }

    @override
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.pending.saved_length = state["loader_length"]
        # Absent in older checkpoints.
        self.pending.saved_samples = state.get("samples_per_batch")
        self.pending.validation_batches = dict(enumerate(state.get("validation_batches", ())))
        if self.epoch and self._run.settings.data.reload_dataloaders_every_n_epochs:
            self.data.loader = None  # configure_optimizers may have made that of epoch 0, to read its length

    def rank_state(self) -> dict[str, Any]:
        """Return the state of this rank for a checkpoint."""
        manual = self.manual_optimization
        if manual is not None:
            weights = manual.weights_state()
        else:
            weights = self.loss_weights.state_dict() if self.in_group > 0 else None
        return rank_state(
            self._run,
            random=self.pending.random_state or RankRandomState.capture(self._run.strategy, self._before_first_batch),
            logged=self.pending.logged or self._logged_state(),
            has_gradients=not self.is_in_backward and (manual is not None or self.in_group > 0),
            weights=weights,
        )

    def _logged_state(self) -> dict[str, Any]:
        """Return the logged values of the epoch, and the states of the module's other metric objects."""
        return {**self.logged.state_dict(), "metrics": self.pending.metrics or self._metric_states()}

    def _metric_states(self) -> dict[str, Any]:
        evaluation = self._run.evaluation_loop
        # Those that have computed their epoch are reset after the hooks at its end, of which one may save.
        computed = [*self.logged.computed_metrics, *(evaluation.logged.computed_metrics if evaluation else ())]
        return metric_states(self._run.strategy.module, [*self.logged.logged_metrics, *computed])

    @property
    def _before_first_batch(self) -> RandomState | None:
        """The random state before the epoch's order was drawn, during the first batch, which a resume reads again."""
        beginning = self.data.reader.beginning
        return beginning.random if self.is_in_batch and not self.batches_done and beginning is not None else None

    @property
    def is_in_backward(self) -> bool:
        """Whether the accumulated gradients include those of the current batch, which a resume repeats."""
        return self._optimization is not None and self._optimization.is_in_backward

    def drop_gradients(self) -> None:
        """Resume without the accumulated gradients of the checkpoint, which the strategy cannot restore."""
        self.group_weight = 0
        if self.pending.resume is not None:
            self.pending.resume.weights = None

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        """Resume from the state of a rank in a checkpoint, when the next epoch begins."""
        self.pending.resume = ResumeState(self._run, state)
        keeps_order = has_shared_order(state)
        if keeps_order != self.data.keeps_order:
            self.data.keeps_order = keeps_order
            self.data.loader = None  # configure_optimizers may have read its length already


def _outputs_for_hooks(outputs: Any) -> Any:
    """Return the result of ``training_step`` in the shape that hooks get in Lightning: a dict with the loss.

    The tensors have no autograd graph, so that its memory is freed.  What a step in manual optimization returns may be
    no dict.
    """
    if outputs is None:
        return {}
    if isinstance(outputs, Tensor):
        return {"loss": outputs.detach()}
    return apply_to_tensors(outputs, Tensor.detach)


def _warn_of_evaluation_mode(module: TrainModule) -> None:
    """Warn if submodules are in evaluation mode, which may be intended, for example for frozen layers."""
    modes = [submodule.training for submodule in module.modules()]
    if not all(modes):
        _log.warning(
            "%d of %d modules are in evaluation mode and stay so while training: call train() on those that should not",
            modes.count(False),
            len(modes),
        )
