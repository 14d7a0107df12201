"""Context of a run: what exists in a process for one fit, validation, test or prediction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from dstrat.training.metrics.logged import LoggedValues
from dstrat.training.metrics.publisher import Metrics

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.hooks import HookRunner
    from dstrat.training.loops.evaluation_loop import EvaluationLoop
    from dstrat.training.loops.sources import DataSources
    from dstrat.training.module.data_module import DataModule
    from dstrat.training.module.train_module import TrainModule


Stage = Literal["fit", "validate", "test", "predict"]


@dataclass(kw_only=True)
class RunContext:
    """Everything that belongs to one run of a Trainer.

    The Trainer makes one for each run, which fills it, and keeps it until the next run.  Users read it through the
    Trainer's properties, which describe the attributes.

    Attributes:
        stage: The method that was called.
        metrics: The values that were logged.
        log_dir: The folder of the loggers, as rank 0 has it; until the ranks agree that of the last run.
        module: The user's module.
        datamodule: The user's data module.
        sources: Where batches come from.
        hooks: Calls the hooks of callbacks and module; only a run has it.
        ckpt_path: The checkpoint that the run begins with.
        logged: Collects what the module logs now.
        evaluation_loop: The loop that validates, tests or predicts.
        evaluation_batches: The number of batches that it takes of each loader.
        return_predictions: Whether ``predict`` returns what the steps return.
        is_running: Whether the run has begun in this process, and not ended.
        is_evaluating: Whether the evaluation loop runs.
        sanity_checking: Whether it is only tried.
        interrupted: Whether a signal ended the run.
    """

    stage: Stage = "fit"
    metrics: Metrics
    log_dir: Path | None = None
    module: TrainModule | None = None
    datamodule: DataModule | None = None
    sources: DataSources | None = None
    hooks: HookRunner = field(init=False, repr=False, compare=False)
    ckpt_path: str | None = None
    logged: LoggedValues = field(default_factory=lambda: LoggedValues(training=True))
    evaluation_loop: EvaluationLoop | None = None
    evaluation_batches: list[int | None] = field(default_factory=list)
    return_predictions: bool = True
    is_running: bool = False
    is_evaluating: bool = False
    sanity_checking: bool = False
    interrupted: bool = False

    def forget_logged_values(self, strategy: Strategy) -> None:
        """Begin without logged values, as after a sanity check."""
        self.metrics = Metrics(strategy)

    def log_to(self, logged: LoggedValues) -> None:
        """Let the module log to a stage; values of other stages stay known."""
        self.logged = logged
        self.metrics.follow(logged)
