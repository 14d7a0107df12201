"""Settings of a Trainer: frozen values by subject, which its attributes read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.interfaces.precision import ClipAlgorithm


Duration: TypeAlias = str | timedelta | Mapping[str, float]
"""A length of time, as users pass it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLimits:
    """Limits of a training; those of the arguments of :class:`~dstrat.Trainer` by the same names.

    Attributes:
        max_epochs: Number of epochs; -1 is no limit.
        max_steps: Number of optimizer steps; -1 is no limit.
        min_epochs: Number of epochs before which ``should_stop`` has no effect.
        min_steps: Number of optimizer steps before which ``should_stop`` has no effect.
        max_time: Time limit, as the user passed it.
        fast_dev_run: Number of batches of a trial run; 0 in a normal run.
    """

    max_epochs: int
    max_steps: int
    min_epochs: int
    min_steps: int
    max_time: Duration | None
    fast_dev_run: int

    def for_trial(self) -> RunLimits:
        """Return the limits of a trial run."""
        return replace(self, max_epochs=1, max_steps=-1, min_epochs=0, min_steps=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class DataLimits:
    """Parts of the data that a run uses, and its loaders.

    Attributes:
        limit_train_batches: Number of training batches in an epoch, or a fraction of them; None is all.
        limit_val_batches: The same for each validation loader.
        limit_test_batches: The same for each test loader.
        limit_predict_batches: The same for each prediction loader.
        overfit_batches: Number or fraction of batches to train on in every epoch; 0 is off.
        reload_dataloaders_every_n_epochs: Epochs after which loaders are made anew; 0 is never.
        use_distributed_sampler: Whether loaders are divided between processes.
    """

    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    overfit_batches: int | float
    reload_dataloaders_every_n_epochs: int
    use_distributed_sampler: bool

    def for_trial(self, batches: int) -> DataLimits:
        """Return the limits of a trial run."""
        return replace(self.overfitting(batches), limit_test_batches=batches, limit_predict_batches=batches)

    def overfitting(self, batches: float) -> DataLimits:
        """Return the limits where training and validation have the same few batches."""
        return replace(self, limit_train_batches=batches, limit_val_batches=batches)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationSettings:
    """When a training validates, and how evaluation runs.

    Attributes:
        check_val_every_n_epoch: Epochs between validations; None counts ``val_check_interval`` across epochs.
        val_check_interval: Batches, fraction of an epoch, or time between validations.
        num_sanity_val_steps: Validation batches before training; -1 is all.
        inference_mode: Whether evaluation runs under ``torch.inference_mode``.
    """

    check_val_every_n_epoch: int | None
    val_check_interval: int | float | Duration | None
    num_sanity_val_steps: int
    inference_mode: bool

    def for_trial(self) -> EvaluationSettings:
        """Return the settings of a trial run."""
        return replace(self, check_val_every_n_epoch=1, val_check_interval=None)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSettings:
    """How a training steps and computes.

    Attributes:
        accumulate_grad_batches: Number of batches whose gradients make up one optimizer step.
        gradient_clip_val: Maximal norm or value of gradients; None does not clip.
        gradient_clip_algorithm: ``"norm"`` or ``"value"``.
        deterministic: Whether operations without a deterministic implementation are errors.
        benchmark: Whether cuDNN searches for its fastest algorithms; None leaves torch's setting.
        sync_batchnorm: Whether batch-norm layers synchronize their statistics.
        detect_anomaly: Whether the first NaN is an error.
    """

    accumulate_grad_batches: int
    gradient_clip_val: float | None
    gradient_clip_algorithm: ClipAlgorithm
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    sync_batchnorm: bool
    detect_anomaly: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputSettings:
    """What a run writes.

    Attributes:
        default_root_dir: Default folder of logs and checkpoints.
        log_every_n_steps: Optimizer steps between two writes of step values; 0 writes none.
        barebones: Whether everything beside training is off.
    """

    default_root_dir: CheckpointPath
    log_every_n_steps: int
    barebones: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSettings:
    """All settings of a Trainer beside its components.

    Attributes:
        limits: Limits of the training.
        data: Parts of the data that are used.
        evaluation: When and how evaluation runs.
        steps: How the training steps and computes.
        output: What a run writes.
    """

    limits: RunLimits
    data: DataLimits
    evaluation: EvaluationSettings
    steps: StepSettings
    output: OutputSettings

    def limited(self) -> TrainerSettings:
        """Return the settings with what ``fast_dev_run``, ``overfit_batches`` and ``gradient_clip_val=0`` imply."""
        steps = replace(self.steps, gradient_clip_val=self.steps.gradient_clip_val or None)
        batches = self.limits.fast_dev_run
        if batches:
            return replace(
                self,
                steps=steps,
                limits=self.limits.for_trial(),
                data=self.data.for_trial(batches),
                evaluation=self.evaluation.for_trial(),
            )
        if self.data.overfit_batches:
            return replace(self, steps=steps, data=self.data.overfitting(self.data.overfit_batches))
        return replace(self, steps=steps)


def setting(group: str, name: str, *, default: Any = None) -> Any:
    """Return a property of the Trainer that reads one of its ``settings``; setting it replaces their frozen value.

    Args:
        group: The attribute of the settings.
        name: The setting.
        default: What the property is where the setting is None.
    """

    def change(trainer: Any, value: Any) -> None:
        changed = replace(getattr(trainer.settings, group), **{name: value})
        trainer.settings = replace(trainer.settings, **{group: changed})

    # attrgetter is no function of Python: a step may read a setting without a call.
    read = attrgetter(f"settings.{group}.{name}")
    if default is None:
        return property(read, change)
    return property(lambda trainer: default if (value := read(trainer)) is None else value, change)
