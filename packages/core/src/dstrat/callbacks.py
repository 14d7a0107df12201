"""Callbacks of the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat import (
        BackboneFinetuning,
        BaseFinetuning,
        BatchSizeFinder,
        Callback,
        DeviceStatsMonitor,
        EarlyStopping,
        EMAWeightAveraging,
        GradientAccumulationScheduler,
        InMemoryCheckpoint,
        LambdaCallback,
        LearningRateFinder,
        LearningRateMonitor,
        ModelCheckpoint,
        ModelPruning,
        ModelSummary,
        OnExceptionCheckpoint,
        PredictionWriter,
        ProgressBar,
        RichProgressBar,
        StochasticWeightAveraging,
        ThroughputMonitor,
        Timer,
        TorchPredictionWriter,
        TQDMProgressBar,
        WeightAveraging,
    )

__all__ = [
    "BackboneFinetuning",
    "BaseFinetuning",
    "BatchSizeFinder",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "InMemoryCheckpoint",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "ModelCheckpoint",
    "ModelPruning",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "PredictionWriter",
    "ProgressBar",
    "RichProgressBar",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "ThroughputMonitor",
    "Timer",
    "TorchPredictionWriter",
    "WeightAveraging",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "dstrat"))
