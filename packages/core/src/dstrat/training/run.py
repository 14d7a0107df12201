"""One run in one process of a job: everything between the launch and the end, in its order."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from dstrat.data.random_state import RandomState
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.optimizers import Optimization
from dstrat.training.anomaly import watched_fit
from dstrat.training.callbacks.defaults import with_callbacks_of
from dstrat.training.checkpoint.path import resolve_checkpoint
from dstrat.training.checkpoint.restore import CheckpointRestore
from dstrat.training.contexts import numerics
from dstrat.training.hooks import HookRunner, hook_of, overrides
from dstrat.training.loggers.defaults import agree_on_folders
from dstrat.training.loops.evaluation_loop import EvaluationLoop
from dstrat.training.loops.stopping import Interrupted, Terminated
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.hyperparameters import log_hyperparameters
from dstrat.training.module.train_module import TrainModule
from dstrat.training.results import FinalState, RunResult

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dstrat.training.callbacks.callback import Callback
    from dstrat.training.checkpoint.path import CheckpointRequest
    from dstrat.training.loops.sources import DataSources
    from dstrat.training.run_context import Stage
    from dstrat.training.trainer import Trainer


def execute(trainer: Trainer, module: TrainModule, sources: DataSources, ckpt_path: CheckpointRequest) -> RunResult:
    """Run the trainer's stage (fit, validate, test or predict) in this process.

    Args:
        trainer: Its settings, strategy and stage.
        module: The user's module.
        sources: Where batches come from.
        ckpt_path: A checkpoint to load first, by its path or as ``"last"``, ``"best"`` or the newest.

    Returns:
        What the process that called the Trainer needs of this one.
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
            ),
        ):
            return _work(trainer, module, sources, ckpt_path)
    finally:  # also after an interrupt while the run is cleaned up
        _end(trainer)


def _work(trainer: Trainer, module: TrainModule, sources: DataSources, ckpt_path: CheckpointRequest) -> RunResult:
    """Prepare and do the stage's work, and free what it took."""
    work = {"fit": _fit, "validate": _evaluate, "test": _evaluate, "predict": _predict}[trainer.stage]
    try:
        _prepare(trainer, module, sources, ckpt_path)
        result = work(trainer, module, sources)
        trainer.strategy.barrier("end")  # what a rank prints after its run is not to land in the bar of rank 0
    except (Interrupted, Terminated) as exception:
        outcome = _stop(trainer, exception)
        if outcome is not None:
            return outcome  # and the process that asked for the run raises it
        if isinstance(exception, Terminated):
            raise
        raise KeyboardInterrupt from None  # Python ends as a shell expects only for this very class
    except BaseException as exception:
        _on_exception(trainer, exception)
        raise
    outcome = RunResult.of(trainer, result)
    if trainer.is_fitting and not trainer.ran_elsewhere:
        trainer.final_optimization = _final_optimization(trainer)
    ended = FinalState.of(trainer)
    _finish(trainer)
    if trainer.is_fitting:  # an evaluation leaves what there is of a fit before it
        trainer.final_state = ended
    return outcome


def _final_optimization(trainer: Trainer) -> Optimization:
    """Return the optimizers and schedulers for after the fit, their state on the CPU, as the module will be."""
    strategy = trainer.strategy
    if strategy.replicates_state and strategy.root_device.type != "cpu":
        for state in [state for optimizer in strategy.optimizers for state in optimizer.state.values()]:
            if isinstance(state, dict):
                state.update(apply_to_tensors(state, strategy.to_host))
    return Optimization(optimizers=tuple(strategy.optimizers), schedulers=tuple(strategy.lr_schedulers))


def execute_elsewhere(random_state: RandomState, *args: Any) -> RunResult:
    """Do the same in a process that starts with the random numbers of the one that launched it."""
    random_state.restore()
    return execute(*args)


def _begin(trainer: Trainer, module: TrainModule, sources: DataSources) -> None:
    """Attach the module and the data module in the process that runs them."""
    context = trainer.context
    module.attach(trainer)
    if sources.datamodule is not None:
        sources.datamodule.attach(trainer)
    trainer.strategy.module_backward = module.backward if overrides(module, "backward", TrainModule) else None
    trainer.callbacks = with_callbacks_of(module, trainer.callbacks)
    _set_logging_module(trainer.callbacks, module)
    context.hooks = HookRunner(trainer, module, trainer.called_callbacks)
    context.is_running = True


def _end(trainer: Trainer) -> None:
    if trainer.module is not None:
        trainer.module.untoggle_optimizer()  # which a step that raised has left toggled
    _set_logging_module(trainer.callbacks, None)
    trainer.strategy.module_backward = None
    trainer.context.is_running = False


def _set_logging_module(callbacks: Iterable[Callback], module: TrainModule | None) -> None:
    for callback in callbacks:
        callback._logging_module = module  # noqa: SLF001 - no public name, which a user's subclass might have too


def _prepare(trainer: Trainer, module: TrainModule, sources: DataSources, ckpt_path: CheckpointRequest) -> None:
    strategy = trainer.strategy
    strategy.setup_environment()
    if strategy.local_rank == 0:
        sources.prepare_data()
    strategy.barrier("prepare_data")
    trainer.context.log_dir = agree_on_folders(trainer.loggers, strategy)
    if trainer.profiler is not None:
        trainer.profiler.start(trainer.stage, trainer.log_dir, trainer.global_rank)
    for hook in _ordered_hooks(trainer, "setup"):
        hook(trainer.stage)
    with strategy.tensor_init_context(), strategy.model_sharded_context():
        hook_of(module, "configure_model", TrainModule)()
    module.attach(trainer)  # what configure_model has made, too
    if trainer.sync_batchnorm and trainer.is_fitting:
        strategy.synchronize_batchnorm()
    path = resolve_checkpoint(trainer, ckpt_path)
    trainer.context.ckpt_path = None if path is None else str(path)
    restoration = None if path is None else CheckpointRestore(trainer, path)
    trainer.publisher.log_graph(module)
    strategy.setup(trainer)
    if trainer.is_fitting:
        strategy.check_set_up()
    trainer.publisher.start_run()
    log_hyperparameters(trainer)
    if restoration is not None:
        restoration.finish()


def _fit(trainer: Trainer, module: TrainModule, sources: DataSources) -> None:
    hooks, loop = trainer.context.hooks, trainer.fit_loop
    with watched_fit(trainer, module):
        loop.setup(module, sources)
        hooks.call("on_fit_start")
        validates = sources.has("val") and sources.has_step("validation_step") and trainer.limit_val_batches != 0
        sanity_checks = validates and trainer.num_sanity_val_steps != 0 and loop.batches_seen == 0  # and not resumed
        if sanity_checks:
            hooks.call_callbacks("on_sanity_check_start")
        validation = None
        if validates:
            validation = EvaluationLoop(trainer, module, sources.loader("val", may_be_none=True), "validation")
            trainer.context.evaluation_loop = validation  # known from now on, and not only when it runs
        if validation is not None and sanity_checks:
            _sanity_check(trainer, validation)
        loop.run(validation)
        trainer.strategy.finish_training()
        hooks.call("on_fit_end")


def _sanity_check(trainer: Trainer, validation: EvaluationLoop) -> None:
    """Try a few validation batches."""
    random_state = RandomState.capture()  # so that training draws the same numbers with and without the check
    trainer.context.sanity_checking = True
    with trainer.interruption:
        validation.run(None if trainer.num_sanity_val_steps == -1 else trainer.num_sanity_val_steps)
    random_state.restore()  # also for a checkpoint that is saved in the hook
    trainer.context.hooks.call_callbacks("on_sanity_check_end")
    trainer.context.sanity_checking = False
    random_state.restore()
    trainer.context.forget_logged_values(trainer.strategy)  # values of a few batches are no results


def _evaluate(trainer: Trainer, module: TrainModule, sources: DataSources) -> list[dict[str, float]]:
    if trainer.stage == "validate":
        loop = EvaluationLoop(trainer, module, sources.loader("val"), "validation")
    else:
        loop = EvaluationLoop(trainer, module, sources.loader("test"), "test")
    with trainer.interruption:
        loop.run()
    return trainer.publisher.results(loop.logged, len(loop.num_batches))


def _predict(trainer: Trainer, module: TrainModule, sources: DataSources) -> list[Any]:
    loop = EvaluationLoop(trainer, module, sources.loader("predict"), "predict")
    loop.keeps_outputs = trainer.context.return_predictions
    with trainer.interruption:
        loop.run()
    if not trainer.context.return_predictions:
        return []
    predictions = loop.predictions()
    return predictions[0] if len(predictions) == 1 else predictions


def _on_exception(trainer: Trainer, exception: BaseException, *, leave: Callable[[], None] | None = None) -> None:
    """Tell everyone, and free what would keep other processes waiting; the exception itself goes on.

    Args:
        trainer: Of the run that breaks.
        exception: What breaks it.
        leave: Is called while every process is still here, and can communicate.
    """
    from dstrat.launch.peer_watch import name_ended_ranks  # only runs that break need it

    trainer.context.interrupted = isinstance(exception, KeyboardInterrupt | SystemExit)
    status = "interrupted" if trainer.context.interrupted else "failed"
    notify: list[Callable[[], None]] = [
        partial(trainer.strategy.on_exception, exception),
        *(partial(hook, exception) for hook in trainer.context.hooks.of_callbacks("on_exception")),
        *([partial(hook_of(trainer.datamodule, "on_exception", DataModule), exception)] if trainer.datamodule else []),
    ]
    if isinstance(exception, Interrupted | Terminated):
        free = notify.pop(0)  # later, as every process is here, so that callbacks may still communicate
        notify += [leave, free] if leave else [free]
    steps: list[Callable[[], None]] = [
        partial(name_ended_ranks, exception),  # while the process group is open
        *notify,
        *_cleanup_steps(trainer, status),
    ]
    for error in _run_all(steps):
        _log.error("cleaning up after %s failed too", type(exception).__name__, exc_info=error)


def _ordered_hooks(trainer: Trainer, name: Literal["setup", "teardown"]) -> list[Callable[[Stage], Any]]:
    """Return a hook of the data module, then of the callbacks, which may look at the data, then of the module."""
    assert trainer.module is not None  # noqa: S101 - there is one in every run
    of_data = [] if trainer.datamodule is None else [hook_of(trainer.datamodule, name, DataModule)]
    return [*of_data, *trainer.context.hooks.of_callbacks(name), hook_of(trainer.module, name, TrainModule)]


def _stop(trainer: Trainer, exception: Interrupted | Terminated) -> RunResult | None:
    """Clean up after a signal; return what the run has come to, where another process asked for it; collective."""
    outcomes: list[RunResult] = []

    def leave() -> None:
        outcomes.append(RunResult.of(trainer, None, stopped_by=exception.signal))

    _on_exception(trainer, exception, leave=leave if trainer.ran_elsewhere else None)
    # The launcher of another machine returns nothing, so that the processes there raise.
    return outcomes[0] if outcomes and trainer.node_rank == 0 else None


def _finish(trainer: Trainer) -> None:
    errors = _run_all(_cleanup_steps(trainer, "success"))
    for other in errors[1:]:
        _log.error("another part of the end of the run failed too", exc_info=other)
    if errors:
        raise errors[0]


def _cleanup_steps(trainer: Trainer, status: str) -> list[Callable[[], None]]:
    return [
        partial(trainer.publisher.finalize, status),
        *(partial(hook, trainer.stage) for hook in _ordered_hooks(trainer, "teardown")),
        trainer.strategy.teardown,
        *([trainer.profiler.finish] if trainer.profiler else []),
    ]


def _run_all(steps: Iterable[Callable[[], None]]) -> list[Exception]:
    """Do every step, also after one that fails; return what went wrong."""
    return [error for step in steps if (error := _error_of(step)) is not None]


def _error_of(step: Callable[[], None]) -> Exception | None:
    try:
        step()
    except Exception as error:  # noqa: BLE001 - the caller decides what becomes of it
        return error
    return None
