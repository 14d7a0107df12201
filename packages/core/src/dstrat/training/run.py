"""A run in one process of a job: preparation, the stage's work, and cleanup, in their order."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dstrat.data.random_state import RandomState, RankRandomState
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.keywords import explain_keyword
from dstrat.interfaces.optimizers import Optimization
from dstrat.interfaces.strategy import log_out_of_memory
from dstrat.parallel.metric_states import states_gathered_by
from dstrat.training.anomaly import watched_fit
from dstrat.training.callbacks.callback import Callback
from dstrat.training.callbacks.defaults import with_callbacks_of
from dstrat.training.checkpoint.path import resolve_checkpoint
from dstrat.training.checkpoint.recovery import continued_checkpoint, join_attempt, rewind_loggers
from dstrat.training.checkpoint.restore import CheckpointRestore, LiveTraining
from dstrat.training.contexts import numerics
from dstrat.training.hooks import HookRunner, hook_of, overrides, warn_of_misspelled_hooks
from dstrat.training.loggers.defaults import agree_on_folders
from dstrat.training.loops.evaluation_loop import EvaluationLoop
from dstrat.training.loops.stopping import Interrupted, Terminated
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.hyperparameters import log_hyperparameters
from dstrat.training.module.train_module import TrainModule
from dstrat.training.results import FinalState, RunResult
from dstrat.training.run_recorder import begin_record, record_results

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.training.checkpoint.path import CheckpointRequest
    from dstrat.training.loops.sources import DataSources
    from dstrat.training.run_context import Stage
    from dstrat.training.trainer import Trainer


def execute(trainer: Trainer, module: TrainModule, sources: DataSources, ckpt_path: CheckpointRequest) -> RunResult:
    """Run the trainer's stage (fit, validate, test or predict) in this process.

    Args:
        trainer: Has the settings, the strategy and the stage.
        module: The user's module.
        sources: The sources of loaders.
        ckpt_path: A checkpoint to load first: its path, ``"last"``, ``"best"`` or a search.

    Returns:
        The result for the process that called the Trainer.
    """
    from dstrat.launch.progress import watched_for_hangs  # only runs need it

    _begin(trainer, module, sources)
    try:
        with (
            numerics(deterministic=trainer.deterministic, benchmark=trainer.benchmark),
            watched_for_hangs(
                trainer.strategy.hang_timeout,
                longest=trainer.strategy.timeout,
                rank=trainer.global_rank,
                local_rank=trainer.local_rank,
                size=trainer.world_size,
            ) as trainer.context.beat,
        ):
            return _work(trainer, module, sources, ckpt_path)
    finally:  # also if a signal interrupts the cleanup
        _end(trainer)


def _work(trainer: Trainer, module: TrainModule, sources: DataSources, ckpt_path: CheckpointRequest) -> RunResult:
    """Prepare the stage, do its work, and clean up."""
    work = {"fit": _fit, "validate": _evaluate, "test": _evaluate, "predict": _predict}[trainer.stage]
    try:
        _prepare(trainer, module, sources, ckpt_path)
        with states_gathered_by(trainer.strategy):
            result = work(trainer, module, sources)
        record_results(trainer)
        # A rank that is done may print, into the progress bar of rank 0: all end together.
        trainer.strategy.barrier("end")
    except (Interrupted, Terminated) as exception:
        outcome = _stop(trainer, exception)
        if outcome is not None:
            return outcome  # the process that called the Trainer restores it, and raises there
        if isinstance(exception, Terminated):
            raise
        raise KeyboardInterrupt from None  # for this class only, not for subclasses, Python exits as after a SIGINT
    except BaseException as exception:
        _on_exception(trainer, exception)
        explain_keyword(exception, (type(module), Callback, type(trainer)))
        raise
    outcome = RunResult.of(trainer, result)
    if trainer.is_fitting and not trainer.ran_elsewhere:
        trainer.final_optimization = _final_optimization(trainer)
    final_state = FinalState.of(trainer)  # before the cleanup, in which the strategy frees it
    _finish(trainer)
    if trainer.is_fitting:  # an evaluation keeps the final state of the fit before it
        trainer.final_state = final_state
    return outcome


def _final_optimization(trainer: Trainer) -> Optimization:
    """Return the optimizers and schedulers for use after the fit, with their state on the CPU, as the module's."""
    strategy = trainer.strategy
    if strategy.replicates_state and strategy.root_device.type != "cpu":
        for state in [state for optimizer in strategy.optimizers for state in optimizer.state.values()]:
            if isinstance(state, dict):
                state.update(apply_to_tensors(state, strategy.to_host))
    return Optimization(optimizers=tuple(strategy.optimizers), schedulers=tuple(strategy.lr_schedulers))


def execute_elsewhere(random_state: RandomState, *args: Any) -> RunResult:
    """Run :func:`execute` in another process, with the random state of the process that launched it."""
    random_state.restore_in_new_process()
    return execute(*args)


def _begin(trainer: Trainer, module: TrainModule, sources: DataSources) -> None:
    """Attach module, data module and callbacks to the run, in the process of the run."""
    context = trainer.context
    module.attach(trainer)
    if sources.datamodule is not None:
        sources.datamodule.attach(trainer)
    # None lets the strategy call Tensor.backward itself: one Python call less per batch.
    trainer.strategy.module_backward = module.backward if overrides(module, "backward", TrainModule) else None
    trainer.callbacks = with_callbacks_of(module, trainer.callbacks)
    _set_logging_module(trainer.callbacks, module)
    context.hooks = HookRunner(trainer, module, trainer.called_callbacks)
    if trainer.is_global_zero:
        for callback in trainer.called_callbacks:
            warn_of_misspelled_hooks(callback, Callback)
        if sources.datamodule is not None:
            warn_of_misspelled_hooks(sources.datamodule, DataModule)
        warn_of_misspelled_hooks(module, TrainModule)
    context.is_running = True


def _end(trainer: Trainer) -> None:
    if trainer.module is not None:
        trainer.module.untoggle_optimizer()  # a step may have raised between toggling and untoggling
    _set_logging_module(trainer.callbacks, None)
    trainer.strategy.module_backward = None
    trainer.context.is_running, trainer.context.beat = False, None


def _set_logging_module(callbacks: Iterable[Callback], module: TrainModule | None) -> None:
    for callback in callbacks:
        callback._logging_module = module  # noqa: SLF001 - a public name could collide with one of a user's subclass


def _prepare(trainer: Trainer, module: TrainModule, sources: DataSources, ckpt_path: CheckpointRequest) -> None:
    strategy = trainer.strategy
    strategy.setup_environment()
    if strategy.local_rank == 0:  # downloads happen once per machine, before any rank reads the files
        sources.prepare_data()
    strategy.barrier("prepare_data")
    # A restarted job writes to the loggers' folders of the attempt before; values after the save point are removed.
    join_attempt(trainer)
    trainer.context.log_dir = agree_on_folders(trainer.loggers, strategy)
    rewind_loggers(trainer)
    begin_record(trainer)
    if trainer.profiler is not None:
        trainer.profiler.start(trainer.stage, trainer.log_dir, trainer.global_rank)
    for hook in _ordered_hooks(trainer, "setup"):
        hook(trainer.stage)
    with strategy.tensor_init_context(), strategy.model_sharded_context():
        hook_of(module, "configure_model", TrainModule)()
    module.attach(trainer)  # again, for submodules that configure_model has made
    if trainer.sync_batchnorm and trainer.is_fitting:
        strategy.synchronize_batchnorm()
    path = continued_checkpoint(trainer) or resolve_checkpoint(trainer, ckpt_path)
    trainer.context.ckpt_path = None if path is None else str(path)
    # In two steps: on_load_checkpoint may change the module before optimizers exist; states are loaded after the setup.
    restoration = None if path is None else CheckpointRestore(trainer, path)
    trainer.publisher.log_graph(module)
    strategy.setup(trainer)
    if trainer.is_fitting:
        strategy.check_set_up()
    trainer.publisher.start_run()
    log_hyperparameters(trainer)
    if restoration is not None:
        restoration.finish()
    if trainer.is_fitting:  # after the checkpoint, whose state that of a running job replaces
        strategy.join_training(LiveTraining(trainer))


def _fit(trainer: Trainer, module: TrainModule, sources: DataSources) -> None:
    hooks, loop = trainer.context.hooks, trainer.fit_loop
    with watched_fit(trainer, module):
        loop.setup(module, sources)
        hooks.call("on_fit_start")
        validates = trainer.limit_val_batches != 0 and sources.validates(warns=trainer.is_global_zero)
        # Not in a resumed fit, whose validation has run before.
        sanity_checks = validates and trainer.num_sanity_val_steps != 0 and loop.batches_seen == 0
        if sanity_checks:
            hooks.call_callbacks("on_sanity_check_start")
        validation = None
        if validates:
            validation = EvaluationLoop(trainer, module, sources.loader("val", may_be_none=True), "validation")
            trainer.context.evaluation_loop = validation  # before its first run, as on_train_start may read it
        if validation is not None and sanity_checks:
            _sanity_check(trainer, validation)
        loop.run(validation)
        trainer.strategy.finish_training()
        hooks.call("on_fit_end")


def _sanity_check(trainer: Trainer, validation: EvaluationLoop) -> None:
    """Run a few validation batches before the training."""
    # Training draws the same random numbers with and without the check.
    random_state = RankRandomState.capture(trainer.strategy)
    trainer.context.sanity_checking = True
    with trainer.interruption:
        validation.run(None if trainer.num_sanity_val_steps == -1 else trainer.num_sanity_val_steps)
    random_state.restore(trainer.strategy)  # for a checkpoint that the hook saves; again below, as the hook may draw
    trainer.context.hooks.call_callbacks("on_sanity_check_end")
    trainer.context.sanity_checking = False
    random_state.restore(trainer.strategy)
    trainer.context.reset_metrics(trainer.strategy)  # values of a few batches are not results


def _evaluate(trainer: Trainer, module: TrainModule, sources: DataSources) -> list[dict[str, float]]:
    limit = trainer.limit_val_batches if trainer.stage == "validate" else trainer.limit_test_batches
    if limit == 0:  # no hook is called either: those at the end of an epoch compute with what its steps have collected
        return []
    if trainer.stage == "validate":
        loop = EvaluationLoop(trainer, module, sources.loader("val"), "validation")
    else:
        loop = EvaluationLoop(trainer, module, sources.loader("test"), "test")
    with trainer.interruption:
        loop.run()
    return trainer.publisher.results(loop.logged, len(loop.num_batches))


def _predict(trainer: Trainer, module: TrainModule, sources: DataSources) -> list[Any]:
    if trainer.limit_predict_batches == 0:
        return []
    loop = EvaluationLoop(trainer, module, sources.loader("predict"), "predict")
    loop.keeps_outputs = trainer.context.return_predictions
    with trainer.interruption:
        loop.run()
    if not trainer.context.return_predictions:
        return []
    predictions = loop.predictions()
    return predictions[0] if len(predictions) == 1 else predictions


def _on_exception(trainer: Trainer, exception: BaseException, *, leave: Callable[[], None] | None = None) -> None:
    """Call the exception hooks and clean up; the caller raises the exception.

    Args:
        trainer: Of the failing run.
        exception: The exception that ends the run.
        leave: Called after the callbacks, while all processes can still communicate; for signals only.
    """
    # Only runs that break need these.
    from dstrat.checkpoint.async_io import finish_write
    from dstrat.launch.ended_peers import name_ended_ranks
    from dstrat.launch.failures import kind_of

    trainer.context.interrupted = isinstance(exception, KeyboardInterrupt | SystemExit)
    status = "interrupted" if trainer.context.interrupted else "failed"
    notify: list[Callable[[], None]] = [
        partial(trainer.strategy.on_exception, exception),
        *(partial(hook, exception) for hook in trainer.context.hooks.of_callbacks("on_exception")),
        *([partial(hook_of(trainer.datamodule, "on_exception", DataModule), exception)] if trainer.datamodule else []),
    ]
    last: list[Callable[[], None]] = []
    if isinstance(exception, Interrupted | Terminated):
        # After a failure the strategy closes its communication first, or other ranks would wait.  At a signal all ranks
        # stop together: callbacks may still communicate, so the strategy comes last.
        close = notify.pop(0)
        notify += [leave, close] if leave else [close]
        cluster = trainer.strategy.parts.cluster_environment
        # Last, as the scheduler ends the processes then.
        if cluster is not None and exception.signal == cluster.requeue_signal and trainer.is_global_zero:
            last = [partial(_requeue, cluster)]
    steps: list[Callable[[], None]] = [
        partial(log_out_of_memory, trainer.strategy, exception),  # before anything is freed
        partial(name_ended_ranks, exception),  # needs the process group, which the next steps close, as does
        partial(finish_write, trainer.strategy, exception, logs=kind_of(exception) == "error"),
        *notify,
        *_cleanup_steps(trainer, status),
        *_record_end(trainer, status, exception),
        *last,
    ]
    for error in _run_all(steps):
        _log.error("cleaning up after %s failed too", type(exception).__name__, exc_info=error)


def _requeue(cluster: ClusterEnvironment) -> None:
    cluster.requeue()
    _log.warning("the job is queued again, and resumes from its checkpoint with fit(resume='auto')")


def _ordered_hooks(trainer: Trainer, name: Literal["setup", "teardown"]) -> list[Callable[[Stage], Any]]:
    """Return a hook of the data module, of the callbacks, which may use its data, and of the module, in this order."""
    assert trainer.module is not None  # noqa: S101 - there is one in every run
    of_data = [] if trainer.datamodule is None else [hook_of(trainer.datamodule, name, DataModule)]
    return [*of_data, *trainer.context.hooks.of_callbacks(name), hook_of(trainer.module, name, TrainModule)]


def _stop(trainer: Trainer, exception: Interrupted | Terminated) -> RunResult | None:
    """Clean up after a signal, and return the result if another process called the Trainer; collective."""
    outcomes: list[RunResult] = []

    def leave() -> None:
        outcomes.append(RunResult.of(trainer, None, stopped_by=exception.signal))

    _on_exception(trainer, exception, leave=leave if trainer.ran_elsewhere else None)
    # Launchers of other machines receive no result: the processes there raise.
    return outcomes[0] if outcomes and trainer.node_rank == 0 else None


def _finish(trainer: Trainer) -> None:
    errors = _run_all(_cleanup_steps(trainer, "success"))
    status = "failed" if errors else "completed"
    errors += _run_all(_record_end(trainer, status, errors[0] if errors else None))
    for error in errors[1:]:
        _log.error("another step of the cleanup after the run failed too", exc_info=error)
    if errors:
        raise errors[0]


def _cleanup_steps(trainer: Trainer, status: str) -> list[Callable[[], None]]:
    return [
        partial(trainer.publisher.finalize, status),
        *(partial(hook, trainer.stage) for hook in _ordered_hooks(trainer, "teardown")),
        trainer.strategy.teardown,
        *([trainer.profiler.finish] if trainer.profiler else []),
    ]


def _record_end(trainer: Trainer, status: str, exception: BaseException | None) -> list[Callable[[], None]]:
    recorder = trainer.context.recorder
    return [] if recorder is None else [partial(recorder.end, trainer, status, exception)]


def _run_all(steps: Iterable[Callable[[], None]]) -> list[Exception]:
    """Run all steps, also after one that fails, and return the errors."""
    errors = []
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001, PERF203 - the caller logs or raises it
            errors.append(error)
    return errors
