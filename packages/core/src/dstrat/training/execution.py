"""Execution of a run: launch, preparation, the stage's work, and cleanup, in their order."""

from __future__ import annotations

import gc
import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dstrat.data.random_state import RandomState, RankRandomState
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.keywords import explain_keyword
from dstrat.interfaces.optimizers import Optimization
from dstrat.interfaces.tied_parameters import checked_ties
from dstrat.launch.elastic import wait_as_newcomer
from dstrat.launch.external import history
from dstrat.launch.rank import run_all
from dstrat.parallel.metric_states import states_gathered_by
from dstrat.training.anomaly import watched_fit
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.defaults import check_callbacks, with_callbacks_of
from dstrat.training.checkpoint.path import resolve_checkpoint
from dstrat.training.checkpoint.recovery import continued_checkpoint, count_steps, join_attempt, rewind_loggers
from dstrat.training.checkpoint.restore import CheckpointRestore, LiveTraining
from dstrat.training.checkpoint.save import check_state_of_optimizers, final_state_of
from dstrat.training.contexts import numerics
from dstrat.training.elastic import begin_again, is_regrouped_after, offer_to_go_on, release_frames, withdraw_offer
from dstrat.training.hooks import HookRunner, hook_of, overrides, warn_of_misspelled_hooks
from dstrat.training.loggers.defaults import agree_on_folders, call_loggers
from dstrat.training.loops.evaluation_loop import EvaluationLoop
from dstrat.training.loops.global_batch import restore_settings
from dstrat.training.loops.newcomers import GroupGrows
from dstrat.training.loops.sources import SOURCES
from dstrat.training.loops.stopping import Interrupted, Terminated, end_by, is_by_signal
from dstrat.training.metrics.logged import LoggedValues
from dstrat.training.metrics.publisher import Publisher
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.hyperparameters import logged_hyperparameters
from dstrat.training.module.train_module import TrainModule
from dstrat.training.results import RunResult
from dstrat.training.run_beginning import RunBeginning
from dstrat.training.run_recorder import begin_record, record_results

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.checkpoint.path import CheckpointRequest
    from dstrat.training.module.hyperparameters import HyperparametersMixin
    from dstrat.training.run import Run, Stage


def launch(run: Run, ckpt_path: CheckpointRequest) -> Any:
    """Execute a run in this process or in those that the strategy's launcher starts; return the method's result."""
    run.strategy.connect(run.module)
    launcher = run.strategy.launcher
    if launcher is None:
        return execute(run, ckpt_path).result
    if launcher.runs_here:
        return launcher.launch(execute, run, ckpt_path).result
    if run.strategy.node_rank == 0 and not launcher.reruns_the_script:
        # Choosing the folders here, not in rank 0, lets this process know them after the run.
        folders = [logger.log_dir for logger in run.loggers]
        run.log_dir = next(filter(None, folders), None)
    try:
        outcome: RunResult | None = launcher.launch(_execute_elsewhere, RandomState.capture(), run, ckpt_path)
    except (KeyboardInterrupt, SystemExit) as error:  # the job was ended at once, without a result
        run.interrupted = is_by_signal(error)
        raise
    if outcome is None:  # on machines without global rank 0
        return None
    if run.is_fitting:
        run.final_optimization = None
    run.module.attach(run.trainer)  # the run has attached its copy of the module only
    outcome.restore(run)
    if outcome.stopped_by:
        run.interrupted, run.interruption.requested = True, outcome.stopped_by
        end_by(outcome.stopped_by)
    return outcome.result


def _execute_elsewhere(random_state: RandomState, run: Run, ckpt_path: CheckpointRequest) -> RunResult:
    """Execute a run in another process, with the random state of the process that launched it."""
    random_state.restore_in_new_process()
    return execute(run, ckpt_path)


def execute(run: Run, ckpt_path: CheckpointRequest) -> RunResult:
    """Execute a run in this process of the job.

    Args:
        run: The run.
        ckpt_path: A checkpoint to load first: its path, ``"last"``, ``"best"`` or a search.

    Returns:
        The result for the process that called the Trainer.
    """
    if run.is_fitting and run.plan.elastic:
        run.beginning = RunBeginning(run.module, run.datamodule, run.callbacks)
    if wait_as_newcomer(history.current_launch):  # in any run: ranks of the job may be in no other
        run.strategy.discard_values()  # as the others have done, whose shards have another size
    try:
        while True:
            outcome = _execute(run, ckpt_path)
            if not isinstance(outcome, Exception):
                return outcome
            again = begin_again(run)
            if again is None:
                raise outcome
            run = again
            del outcome  # whose frames hold the run before
    finally:
        run.beginning = None


def _execute(run: Run, ckpt_path: CheckpointRequest) -> RunResult | Exception:
    """Execute a run in this process as one rank; return the exception after which it is to be another rank."""
    from dstrat.launch.progress import watched_for_hangs  # only runs need it

    steps = run.settings.steps
    _begin(run)
    try:
        with (
            numerics(deterministic=steps.deterministic, benchmark=steps.benchmark),
            watched_for_hangs(run.strategy) as run.beat,
        ):
            return _work(run, ckpt_path)
    finally:  # also if a signal interrupts the cleanup
        _end(run)


def _work(run: Run, ckpt_path: CheckpointRequest) -> RunResult | Exception:
    """Prepare the stage, do its work, and clean up."""
    work: Callable[[Run], Any] = _fit if run.is_fitting else _evaluate
    try:
        _prepare(run, ckpt_path)
        try:
            with states_gathered_by(run.strategy):
                result = work(run)
        finally:  # a step may have raised while an optimizer was toggled, and the cleanup may replace parameters
            run.module.untoggle_optimizer()
        record_results(run)
        withdraw_offer(run)
        # A rank that is done may print, into the progress bar of rank 0: all end together.
        run.strategy.barrier("end")
    except (Interrupted, Terminated) as exception:
        outcome = _stop(run, exception)
        if outcome is not None:
            return outcome  # the process that called the Trainer restores it, and raises there
        if isinstance(exception, Terminated):
            raise
        raise KeyboardInterrupt from None  # for this class only, not for subclasses, Python exits as after a SIGINT
    except BaseException as exception:
        if isinstance(exception, Exception) and is_regrouped_after(run, exception):
            _leave_group(run, exception)
            return exception
        _on_exception(run, exception)
        explain_keyword(exception, (type(run.module), Callback, type(run.trainer)))
        raise
    outcome = RunResult.of(run, result)
    if run.is_fitting and not run.ran_elsewhere:
        run.final_optimization = _final_optimization(run.strategy)
    final_state = final_state_of(run)  # before the cleanup, in which the strategy frees it
    _finish(run)
    if run.is_fitting:  # an evaluation keeps the final state of the fit before it
        run.final_state = final_state
    return outcome


def _final_optimization(strategy: Strategy) -> Optimization:
    """Return the optimizers and schedulers for use after the fit, with their state on the CPU, as the module's."""
    if strategy.replicates_state and strategy.root_device.type != "cpu":
        for state in [state for optimizer in strategy.optimizers for state in optimizer.state.values()]:
            if isinstance(state, dict):
                state.update(apply_to_tensors(state, strategy.to_host))
    return Optimization(optimizers=tuple(strategy.optimizers), schedulers=tuple(strategy.lr_schedulers))


def _begin(run: Run) -> None:
    """Attach module, data module and callbacks to the run, in the process of the run."""
    module, datamodule, trainer = run.module, run.datamodule, run.trainer
    module.attach(trainer)
    if datamodule is not None:
        datamodule.attach(trainer)
    # None lets the strategy call Tensor.backward itself: one Python call less per batch.
    run.strategy.module_backward = module.backward if overrides(module, "backward", TrainModule) else None
    trainer.callbacks = with_callbacks_of(module, trainer.callbacks)
    _set_logging_module(run.callbacks, module)
    run.hooks = HookRunner(trainer, module, run.called_callbacks, run.profiled)
    run.logged, run.publisher = LoggedValues(training=True), Publisher(run)
    if run.is_global_zero:
        for callback in run.called_callbacks:
            warn_of_misspelled_hooks(callback, Callback)
        if datamodule is not None:
            warn_of_misspelled_hooks(datamodule, DataModule)
        warn_of_misspelled_hooks(module, TrainModule)
        if run.stage == "predict" and run.sources is not None:
            run.sources.warn_of_default_predictions()
    run.is_running = True


def _end(run: Run) -> None:
    restore_settings(run)
    _set_logging_module(run.callbacks, None)
    run.strategy.module_backward = None
    run.final_world_size = run.world_size
    run.is_running, run.beat = False, None


def _set_logging_module(callbacks: Iterable[Callback], module: TrainModule | None) -> None:
    for callback in callbacks:
        callback._logging_module = module  # noqa: SLF001 - a public name could collide with one of a user's subclass


def _take_new_callbacks(run: Run, before: list[Callback]) -> None:
    """Call the hooks of the callbacks that ``setup`` has added to the Trainer's, from their own ``setup`` on."""
    changed, run.trainer.callbacks = run.callbacks, before  # also if one of them is no callback
    callbacks = run.trainer.callbacks = check_callbacks(changed)
    added = [callback for callback in callbacks if callback not in before]
    _set_logging_module(added, run.module)
    run.hooks.replace_callbacks(run.called_callbacks)
    for callback in run.called_callbacks:
        if callback in added:
            callback.setup(run.trainer, run.module, run.stage)


def _prepare(run: Run, ckpt_path: CheckpointRequest) -> None:
    module, strategy = run.module, run.strategy
    strategy.setup_environment()
    if strategy.local_rank == 0:  # downloads happen once per machine, before any rank reads the files
        run.sources.prepare_data()
    strategy.barrier("prepare_data")
    # A restarted job writes to the loggers' folders of the attempt before; values after the save point are removed.
    join_attempt(run)
    run.log_dir = agree_on_folders(run.loggers, strategy)
    rewind_loggers(run)
    count_steps(run)
    offer_to_go_on(run)
    begin_record(run)
    if run.profiler is not None:
        run.profiler.start(run.stage, run.output_dir, strategy.global_rank)
    callbacks = list(run.callbacks)
    for hook in _ordered_hooks(run, "setup"):
        hook(run.stage)
    if run.callbacks != callbacks:
        _take_new_callbacks(run, callbacks)
    with checked_ties(module), strategy.tensor_init_context(), strategy.model_sharded_context():
        hook_of(module, "configure_model", TrainModule)()
    module.attach(run.trainer)  # again, for submodules that configure_model has made
    if run.settings.steps.sync_batchnorm and run.is_fitting:
        strategy.synchronize_batchnorm()
    path = continued_checkpoint(run) or resolve_checkpoint(run, ckpt_path)
    run.ckpt_path = None if path is None else str(path)
    # In two steps: on_load_checkpoint may change the module before optimizers exist; states are loaded after the setup.
    restoration = None if path is None else CheckpointRestore(run, path)
    call_loggers(run.loggers, "log_graph", module)  # before the strategy wraps the module
    run.profiled("setup", strategy.setup)(run.trainer)
    if run.is_fitting:
        strategy.check_set_up()
    call_loggers(run.loggers, "start_run")
    owners: list[HyperparametersMixin] = [module] if run.datamodule is None else [module, run.datamodule]
    warns = run.is_fitting and bool(run.checkpoint_callbacks) and run.is_global_zero
    if hyperparameters := logged_hyperparameters(owners, warns=warns):
        call_loggers(run.loggers, "log_hyperparams", hyperparameters)
    if restoration is not None:
        restoration.finish()
    if run.is_fitting:
        check_state_of_optimizers(run)
        # After the checkpoint, whose state that of a running job replaces.
        strategy.join_training(LiveTraining(run))


def _fit(run: Run) -> None:
    hooks, loop, sources = run.hooks, run.fit_loop, run.sources
    with watched_fit(run):
        loop.setup()
        hooks.call("on_fit_start")
        validates = run.settings.data.limit_val_batches != 0 and sources.validates(warns=run.is_global_zero)
        # Not in a resumed fit, whose validation has run before.
        num_sanity_steps = run.settings.evaluation.num_sanity_val_steps
        sanity_checks = validates and num_sanity_steps != 0 and loop.batches_seen == 0
        if sanity_checks:
            run.sanity_checking = True  # also in val_dataloader
            hooks.call_callbacks("on_sanity_check_start")
        if validates:  # before its first run, as on_train_start may read it
            run.evaluation_loop = EvaluationLoop(run, sources.loader("val", may_be_none=True), "val")
        if run.evaluation_loop is not None and sanity_checks:
            _sanity_check(run, run.evaluation_loop, None if num_sanity_steps == -1 else num_sanity_steps)
        loop.run()
        run.strategy.finish_training()
        hooks.call("on_fit_end")


def _sanity_check(run: Run, validation: EvaluationLoop, at_most: int | None) -> None:
    """Run a few validation batches before the training."""
    random_state = RankRandomState.capture(run.strategy)  # training draws the same numbers with and without the check
    with run.interruption:
        validation.run(at_most)
    random_state.restore(run.strategy)  # for a checkpoint that the hook saves; again below, as the hook may draw
    run.hooks.call_callbacks("on_sanity_check_end")
    run.sanity_checking = False
    random_state.restore(run.strategy)
    run.reset_metrics()  # values of a few batches are not results


def _evaluate(run: Run) -> list[Any]:
    source = SOURCES[run.stage]
    # No hook is called either: those at the end of an epoch compute with what its steps have collected.
    if getattr(run.settings.data, f"limit_{source}_batches") == 0:
        return []
    loop = EvaluationLoop(run, run.sources.loader(source), source)
    with run.interruption:
        loop.run()
    if source != "predict":
        return run.publisher.results(loop.logged, len(loop.num_batches))
    predictions = loop.predictions() if run.return_predictions else []
    return predictions[0] if len(predictions) == 1 else predictions


def _on_exception(run: Run, exception: BaseException, *, leave: Callable[[], None] | None = None) -> None:
    """Call the exception hooks and clean up; the caller raises the exception.

    Args:
        run: The failing run.
        exception: The exception that ends the run.
        leave: Called after the callbacks, while all processes can still communicate; for signals only.
    """
    from dstrat.launch.rank import clean_up_after  # only runs that break need it

    run.interrupted = isinstance(exception, KeyboardInterrupt | SystemExit)
    status = "interrupted" if run.interrupted else "failed"
    notify: list[Callable[[], None]] = [
        partial(run.strategy.on_exception, exception),
        *(partial(hook, exception) for hook in run.hooks.of_callbacks("on_exception")),
        *([partial(hook_of(run.datamodule, "on_exception", DataModule), exception)] if run.datamodule else []),
    ]
    last: list[Callable[[], None]] = []
    if isinstance(exception, Interrupted | Terminated):
        # After a failure the strategy closes its communication first, or other ranks would wait.  At a signal all ranks
        # stop together: callbacks may still communicate, so the strategy comes last.
        close = notify.pop(0)
        notify += [leave, close] if leave else [close]
        cluster = run.strategy.components.cluster_environment
        # Last, as the scheduler ends the processes then.
        if cluster is not None and exception.signal == cluster.requeue_signal and run.is_global_zero:
            last = [partial(_requeue, cluster)]
    steps = [*notify, *_cleanup_steps(run, status), *_record_end(run, status, exception), *last]
    clean_up_after(exception, run.strategy, steps)


def _leave_group(run: Run, exception: BaseException) -> None:
    """Clean up after a rank has died, or when new ones join, for a run that begins again in this process."""
    from dstrat.checkpoint.async_io import finish_write
    from dstrat.launch.failures import kind_of

    status = "interrupted" if isinstance(exception, GroupGrows) else "failed"
    # Neither the program nor its callbacks see an exception: the fit goes on.
    steps: list[Callable[[], None]] = [
        # Before the wait for a write, which ranks that still wait for this one would hold up.
        partial(run.strategy.on_exception, exception),
        partial(finish_write, run.strategy, exception, logs=False),
        *_cleanup_steps(run, status),
        *_record_end(run, status, exception),
        run.strategy.discard_values,
    ]
    errors = run_all(steps)
    for error in errors:
        if kind_of(error) == "error":
            _log.error("cleaning up before the ranks form another group failed", exc_info=error)
    # Frames first: by the garbage collector alone, workers of loaders would end seconds later.
    for each in (exception, *errors):
        release_frames(each)
    run.drop_loops()
    gc.collect()


def _requeue(cluster: ClusterEnvironment) -> None:
    cluster.requeue()
    _log.warning("the job is queued again, and resumes from its checkpoint with fit(resume='auto')")


def _ordered_hooks(run: Run, name: Literal["setup", "teardown"]) -> list[Callable[[Stage], Any]]:
    """Return a hook of the data module, of the callbacks, which may use its data, and of the module, in this order."""
    of_data = [] if run.datamodule is None else [hook_of(run.datamodule, name, DataModule)]
    return [*of_data, *run.hooks.of_callbacks(name), hook_of(run.module, name, TrainModule)]


def _stop(run: Run, exception: Interrupted | Terminated) -> RunResult | None:
    """Clean up after a signal, and return the result if another process called the Trainer; collective."""
    outcomes: list[RunResult] = []

    def leave() -> None:
        outcomes.append(RunResult.of(run, None, stopped_by=exception.signal))

    _on_exception(run, exception, leave=leave if run.ran_elsewhere else None)
    # Launchers of other machines receive no result: the processes there raise.
    return outcomes[0] if outcomes and run.strategy.node_rank == 0 else None


def _finish(run: Run) -> None:
    errors = run_all(_cleanup_steps(run, "success"))
    status = "failed" if errors else "completed"
    errors += run_all(_record_end(run, status, errors[0] if errors else None))
    for error in errors[1:]:
        _log.error("another step of the cleanup after the run failed too", exc_info=error)
    if errors:
        raise errors[0]


def _cleanup_steps(run: Run, status: str) -> list[Callable[[], None]]:
    return [
        partial(call_loggers, run.loggers, "finalize", status),
        *(partial(hook, run.stage) for hook in _ordered_hooks(run, "teardown")),
        run.strategy.teardown,
        *([run.profiler.finish] if run.profiler else []),
    ]


def _record_end(run: Run, status: str, exception: BaseException | None) -> list[Callable[[], None]]:
    recorder = run.recorder
    return [] if recorder is None else [partial(recorder.end, run, status, exception)]
