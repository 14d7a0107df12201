"""One run in one process of a job: everything between the launch and the end, in its order."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from dstrat.training.checkpoint import restore_checkpoint
from dstrat.training.loops.evaluation_loop import EvaluationLoop
from dstrat.training.loops.interruption import Interrupted, Terminated
from dstrat.training.metrics.latest import Metrics
from dstrat.training.outcome import Outcome
from dstrat.training.random_state import RandomState

_log = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from dstrat.training.data.sources import Sources
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


def execute(trainer: Trainer, module: TrainModule, sources: Sources, ckpt_path: str | Path | None) -> Outcome:
    """Run the trainer's stage (fit, validate, test or predict) in this process.

    Args:
        trainer: Its settings, strategy and stage.
        module: The user's module.
        sources: Where batches come from.
        ckpt_path: A checkpoint to load first.

    Returns:
        What the process that called the Trainer needs of this one.
    """
    trainer.begin(module, sources)
    work = {"fit": _fit, "validate": _evaluate, "test": _evaluate, "predict": _predict}[trainer.stage]
    try:
        _prepare(trainer, module, sources)
        if ckpt_path is not None:
            restore_checkpoint(trainer, ckpt_path)
        result = work(trainer, module, sources)
    except BaseException as exception:
        _on_exception(trainer, sources, exception)
        raise
    outcome = Outcome.of(trainer, result)
    _finish(trainer, sources)
    return outcome


def execute_elsewhere(random_state: RandomState, *args: Any) -> Outcome:
    """Do the same in a process that starts with the random numbers of the one that launched it."""
    random_state.restore()
    return execute(*args)


def _prepare(trainer: Trainer, module: TrainModule, sources: Sources) -> None:
    strategy, dispatch = trainer.strategy, trainer.dispatch
    strategy.setup_environment()
    if strategy.local_rank == 0:
        sources.prepare_data()
    strategy.barrier("prepare_data")
    trainer.agree_on_log_dir()
    dispatch.call_callbacks("setup", trainer.stage)
    sources.setup(trainer.stage)
    with strategy.tensor_init_context(), strategy.model_sharded_context():
        module.configure_model()
    strategy.setup(trainer)


def _fit(trainer: Trainer, module: TrainModule, sources: Sources) -> None:
    dispatch = trainer.dispatch
    dispatch.call("on_fit_start")
    validation = _validation(trainer, module, sources)
    if validation is not None and trainer.num_sanity_val_steps:
        _sanity_check(trainer, validation)
    trainer.fit_loop.run(module, sources.loader("train"), validation)
    dispatch.call("on_fit_end")


def _validation(trainer: Trainer, module: TrainModule, sources: Sources) -> EvaluationLoop | None:
    if not sources.has("val") or trainer.limit_val_batches == 0 or not sources.has_step("validation_step"):
        return None
    return EvaluationLoop(trainer, module, sources.loader("val"), "validation")


def _sanity_check(trainer: Trainer, validation: EvaluationLoop) -> None:
    random_state = RandomState.capture()  # so that training draws the same numbers with and without the check
    trainer.sanity_checking = True
    trainer.dispatch.call_callbacks("on_sanity_check_start")
    validation.run(trainer.num_sanity_val_steps)
    trainer.dispatch.call_callbacks("on_sanity_check_end")
    trainer.sanity_checking = False
    random_state.restore()
    trainer.metrics = Metrics()  # values of a few batches are no results


def _evaluate(trainer: Trainer, module: TrainModule, sources: Sources) -> list[dict[str, float]]:
    if trainer.stage == "validate":
        loop = EvaluationLoop(trainer, module, sources.loader("val"), "validation")
    else:
        loop = EvaluationLoop(trainer, module, sources.loader("test"), "test")
    loop.run()
    return trainer.evaluation_results(len(loop.num_batches))


def _predict(trainer: Trainer, module: TrainModule, sources: Sources) -> list[Any]:
    loop = EvaluationLoop(trainer, module, sources.loader("predict"), "predict")
    loop.run()
    predictions = loop.predictions()
    return predictions[0] if len(predictions) == 1 else predictions


def _on_exception(trainer: Trainer, sources: Sources, exception: BaseException) -> None:
    """Tell everyone, and free what would keep other processes waiting; the exception itself goes on."""
    status = "interrupted" if isinstance(exception, KeyboardInterrupt | SystemExit) else "failed"
    tell: list[Callable[[], None]] = [
        partial(trainer.strategy.on_exception, exception),
        partial(trainer.dispatch.call_callbacks, "on_exception", exception),
    ]
    if isinstance(exception, Interrupted | Terminated):
        tell.reverse()  # every process is here, so that callbacks may still communicate
    steps: list[Callable[[], None]] = [
        *tell,
        *_last_steps(trainer, sources, status),
    ]
    for error in _do_all(steps):
        _log.error("cleaning up after %s failed too", type(exception).__name__, exc_info=error)


def _finish(trainer: Trainer, sources: Sources) -> None:
    for error in _do_all(_last_steps(trainer, sources, "success")):
        raise error


def _last_steps(trainer: Trainer, sources: Sources, status: str) -> list[Callable[[], None]]:
    return [
        *(partial(logger.finalize, status) for logger in trainer.writing_loggers),
        partial(trainer.dispatch.call_callbacks, "teardown", trainer.stage),
        partial(sources.teardown, trainer.stage),
        trainer.strategy.teardown,
        trainer.end,
    ]


def _do_all(steps: Iterable[Callable[[], None]]) -> list[Exception]:
    """Do every step, also after one that fails; return what went wrong."""
    return [error for step in steps if (error := _error_of(step)) is not None]


def _error_of(step: Callable[[], None]) -> Exception | None:
    try:
        step()
    except Exception as error:  # noqa: BLE001 - the caller decides what becomes of it
        return error
    return None
