"""Distributed-training strategies for PyTorch as a plugin ecosystem.

Public names are resolved on first use, so that ``import dstrat`` loads nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.builtin.accelerators.devices import parse_devices as parse_devices
    from dstrat.builtin.clusters.external import ExternalEnvironment as ExternalEnvironment
    from dstrat.builtin.clusters.external import RankNames as RankNames
    from dstrat.builtin.single_device import SingleDeviceStrategy as SingleDeviceStrategy
    from dstrat.checkpoint.torch_file import TorchCheckpointIO as TorchCheckpointIO
    from dstrat.data.combined_loader import CombinedLoader as CombinedLoader
    from dstrat.data.random_state import seed_everything as seed_everything
    from dstrat.data.sharded_dataset import ShardedIterableDataset as ShardedIterableDataset
    from dstrat.errors import DstratError as DstratError
    from dstrat.interfaces.accelerator import Accelerator as Accelerator
    from dstrat.interfaces.accelerator import Devices as Devices
    from dstrat.interfaces.batch import apply_to_tensors as apply_to_tensors
    from dstrat.interfaces.checkpoint_io import CheckpointIO as CheckpointIO
    from dstrat.interfaces.cluster import ClusterEnvironment as ClusterEnvironment
    from dstrat.interfaces.launcher import Launcher as Launcher
    from dstrat.interfaces.pipeline import Pipeline as Pipeline
    from dstrat.interfaces.precision import Precision as Precision
    from dstrat.interfaces.strategy import Strategy as Strategy
    from dstrat.launch.task import RankOutcome as RankOutcome
    from dstrat.launch.task import RankTask as RankTask
    from dstrat.launch.task import dump_call as dump_call
    from dstrat.launch.task import make_rank_tasks as make_rank_tasks
    from dstrat.launch.task import remove_job_folder as remove_job_folder
    from dstrat.launch.task import result_of_ranks as result_of_ranks
    from dstrat.own_loop.loop import OwnLoop as OwnLoop
    from dstrat.own_loop.loop import build as build
    from dstrat.parallel.collectives import broadcast_tensors as broadcast_tensors
    from dstrat.parallel.collectives import take_from_first_rank as take_from_first_rank
    from dstrat.parallel.gathered_optimizer import GatheredOptimizer as GatheredOptimizer
    from dstrat.parallel.gradient_sync import GradientSyncStrategy as GradientSyncStrategy
    from dstrat.parallel.muon import Muon as Muon
    from dstrat.parallel.strategy import ParallelStrategy as ParallelStrategy
    from dstrat.plugins.component import Adapter as Adapter
    from dstrat.plugins.component import Component as Component
    from dstrat.plugins.component import Tombstone as Tombstone
    from dstrat.plugins.component import hookimpl as hookimpl
    from dstrat.plugins.registry import AcceleratorRegistry as AcceleratorRegistry
    from dstrat.plugins.registry import StrategyRegistry as StrategyRegistry
    from dstrat.resolve.rank_zero import rank_zero_info as rank_zero_info
    from dstrat.resolve.rank_zero import rank_zero_only as rank_zero_only
    from dstrat.resolve.rank_zero import rank_zero_warn as rank_zero_warn
    from dstrat.training.callbacks.batch_size_finder import BatchSizeFinder as BatchSizeFinder
    from dstrat.training.callbacks.callback import Callback as Callback
    from dstrat.training.callbacks.device_stats_monitor import DeviceStatsMonitor as DeviceStatsMonitor
    from dstrat.training.callbacks.early_stopping import EarlyStopping as EarlyStopping
    from dstrat.training.callbacks.early_stopping import EarlyStoppingReason as EarlyStoppingReason
    from dstrat.training.callbacks.finetuning import BackboneFinetuning as BackboneFinetuning
    from dstrat.training.callbacks.finetuning import BaseFinetuning as BaseFinetuning
    from dstrat.training.callbacks.gradient_accumulation_scheduler import (
        GradientAccumulationScheduler as GradientAccumulationScheduler,
    )
    from dstrat.training.callbacks.in_memory_checkpoint import InMemoryCheckpoint as InMemoryCheckpoint
    from dstrat.training.callbacks.lambda_callback import LambdaCallback as LambdaCallback
    from dstrat.training.callbacks.learning_rate_finder import LearningRateFinder as LearningRateFinder
    from dstrat.training.callbacks.learning_rate_monitor import LearningRateMonitor as LearningRateMonitor
    from dstrat.training.callbacks.model_checkpoint import ModelCheckpoint as ModelCheckpoint
    from dstrat.training.callbacks.model_pruning import ModelPruning as ModelPruning
    from dstrat.training.callbacks.model_summary import ModelSummary as ModelSummary
    from dstrat.training.callbacks.on_exception_checkpoint import OnExceptionCheckpoint as OnExceptionCheckpoint
    from dstrat.training.callbacks.prediction_writer import PredictionWriter as PredictionWriter
    from dstrat.training.callbacks.prediction_writer import TorchPredictionWriter as TorchPredictionWriter
    from dstrat.training.callbacks.prediction_writer import read_predictions as read_predictions
    from dstrat.training.callbacks.progress_bar import ProgressBar as ProgressBar
    from dstrat.training.callbacks.rich_progress_bar import RichProgressBar as RichProgressBar
    from dstrat.training.callbacks.rich_progress_bar import RichProgressBarTheme as RichProgressBarTheme
    from dstrat.training.callbacks.stochastic_weight_averaging import (
        StochasticWeightAveraging as StochasticWeightAveraging,
    )
    from dstrat.training.callbacks.throughput_monitor import ThroughputMonitor as ThroughputMonitor
    from dstrat.training.callbacks.timer import Timer as Timer
    from dstrat.training.callbacks.tqdm_progress_bar import TQDMProgressBar as TQDMProgressBar
    from dstrat.training.callbacks.tuner import Tuner as Tuner
    from dstrat.training.callbacks.weight_averaging import EMAWeightAveraging as EMAWeightAveraging
    from dstrat.training.callbacks.weight_averaging import WeightAveraging as WeightAveraging
    from dstrat.training.loggers.comet_logger import CometLogger as CometLogger
    from dstrat.training.loggers.csv_logger import CSVLogger as CSVLogger
    from dstrat.training.loggers.logger import Logger as Logger
    from dstrat.training.loggers.mlflow_logger import MLFlowLogger as MLFlowLogger
    from dstrat.training.loggers.tensorboard_logger import TensorBoardLogger as TensorBoardLogger
    from dstrat.training.loggers.wandb_logger import WandbLogger as WandbLogger
    from dstrat.training.module.data_module import DataModule as DataModule
    from dstrat.training.module.hyperparameters import HyperparametersMixin as HyperparametersMixin
    from dstrat.training.module.optimization import grad_norm as grad_norm
    from dstrat.training.module.train_module import TrainModule as TrainModule
    from dstrat.training.profilers.advanced import AdvancedProfiler as AdvancedProfiler
    from dstrat.training.profilers.profiler import Profiler as Profiler
    from dstrat.training.profilers.simple import SimpleProfiler as SimpleProfiler
    from dstrat.training.profilers.torch_profiler import TorchProfiler as TorchProfiler
    from dstrat.training.run import RunningStage as RunningStage
    from dstrat.training.run import TrainerFn as TrainerFn
    from dstrat.training.run import TrainerStatus as TrainerStatus
    from dstrat.training.trainer import Trainer as Trainer

    __version__: str

_HOMES = {
    "Accelerator": "dstrat.interfaces.accelerator",
    "AcceleratorRegistry": "dstrat.plugins.registry",
    "Adapter": "dstrat.plugins.component",
    "AdvancedProfiler": "dstrat.training.profilers.advanced",
    "BackboneFinetuning": "dstrat.training.callbacks.finetuning",
    "BaseFinetuning": "dstrat.training.callbacks.finetuning",
    "BatchSizeFinder": "dstrat.training.callbacks.batch_size_finder",
    "CSVLogger": "dstrat.training.loggers.csv_logger",
    "Callback": "dstrat.training.callbacks.callback",
    "CheckpointIO": "dstrat.interfaces.checkpoint_io",
    "ClusterEnvironment": "dstrat.interfaces.cluster",
    "CombinedLoader": "dstrat.data.combined_loader",
    "CometLogger": "dstrat.training.loggers.comet_logger",
    "Component": "dstrat.plugins.component",
    "DataModule": "dstrat.training.module.data_module",
    "DeviceStatsMonitor": "dstrat.training.callbacks.device_stats_monitor",
    "Devices": "dstrat.interfaces.accelerator",
    "DstratError": "dstrat.errors",
    "EMAWeightAveraging": "dstrat.training.callbacks.weight_averaging",
    "EarlyStopping": "dstrat.training.callbacks.early_stopping",
    "EarlyStoppingReason": "dstrat.training.callbacks.early_stopping",
    "ExternalEnvironment": "dstrat.builtin.clusters.external",
    "GatheredOptimizer": "dstrat.parallel.gathered_optimizer",
    "GradientAccumulationScheduler": "dstrat.training.callbacks.gradient_accumulation_scheduler",
    "GradientSyncStrategy": "dstrat.parallel.gradient_sync",
    "HyperparametersMixin": "dstrat.training.module.hyperparameters",
    "InMemoryCheckpoint": "dstrat.training.callbacks.in_memory_checkpoint",
    "LambdaCallback": "dstrat.training.callbacks.lambda_callback",
    "Launcher": "dstrat.interfaces.launcher",
    "LearningRateFinder": "dstrat.training.callbacks.learning_rate_finder",
    "LearningRateMonitor": "dstrat.training.callbacks.learning_rate_monitor",
    "Logger": "dstrat.training.loggers.logger",
    "MLFlowLogger": "dstrat.training.loggers.mlflow_logger",
    "ModelCheckpoint": "dstrat.training.callbacks.model_checkpoint",
    "ModelPruning": "dstrat.training.callbacks.model_pruning",
    "ModelSummary": "dstrat.training.callbacks.model_summary",
    "Muon": "dstrat.parallel.muon",
    "OnExceptionCheckpoint": "dstrat.training.callbacks.on_exception_checkpoint",
    "OwnLoop": "dstrat.own_loop.loop",
    "ParallelStrategy": "dstrat.parallel.strategy",
    "Pipeline": "dstrat.interfaces.pipeline",
    "Precision": "dstrat.interfaces.precision",
    "PredictionWriter": "dstrat.training.callbacks.prediction_writer",
    "Profiler": "dstrat.training.profilers.profiler",
    "ProgressBar": "dstrat.training.callbacks.progress_bar",
    "RankNames": "dstrat.builtin.clusters.external",
    "RankOutcome": "dstrat.launch.task",
    "RankTask": "dstrat.launch.task",
    "RichProgressBar": "dstrat.training.callbacks.rich_progress_bar",
    "RichProgressBarTheme": "dstrat.training.callbacks.rich_progress_bar",
    "RunningStage": "dstrat.training.run",
    "ShardedIterableDataset": "dstrat.data.sharded_dataset",
    "SimpleProfiler": "dstrat.training.profilers.simple",
    "SingleDeviceStrategy": "dstrat.builtin.single_device",
    "StochasticWeightAveraging": "dstrat.training.callbacks.stochastic_weight_averaging",
    "Strategy": "dstrat.interfaces.strategy",
    "StrategyRegistry": "dstrat.plugins.registry",
    "TQDMProgressBar": "dstrat.training.callbacks.tqdm_progress_bar",
    "TensorBoardLogger": "dstrat.training.loggers.tensorboard_logger",
    "ThroughputMonitor": "dstrat.training.callbacks.throughput_monitor",
    "Timer": "dstrat.training.callbacks.timer",
    "Tombstone": "dstrat.plugins.component",
    "TorchCheckpointIO": "dstrat.checkpoint.torch_file",
    "TorchPredictionWriter": "dstrat.training.callbacks.prediction_writer",
    "TorchProfiler": "dstrat.training.profilers.torch_profiler",
    "TrainModule": "dstrat.training.module.train_module",
    "Trainer": "dstrat.training.trainer",
    "TrainerFn": "dstrat.training.run",
    "TrainerStatus": "dstrat.training.run",
    "Tuner": "dstrat.training.callbacks.tuner",
    "WandbLogger": "dstrat.training.loggers.wandb_logger",
    "WeightAveraging": "dstrat.training.callbacks.weight_averaging",
    "apply_to_tensors": "dstrat.interfaces.batch",
    "broadcast_tensors": "dstrat.parallel.collectives",
    "build": "dstrat.own_loop.loop",
    "dump_call": "dstrat.launch.task",
    "grad_norm": "dstrat.training.module.optimization",
    "hookimpl": "dstrat.plugins.component",
    "make_rank_tasks": "dstrat.launch.task",
    "parse_devices": "dstrat.builtin.accelerators.devices",
    "rank_zero_info": "dstrat.resolve.rank_zero",
    "rank_zero_only": "dstrat.resolve.rank_zero",
    "rank_zero_warn": "dstrat.resolve.rank_zero",
    "read_predictions": "dstrat.training.callbacks.prediction_writer",
    "remove_job_folder": "dstrat.launch.task",
    "result_of_ranks": "dstrat.launch.task",
    "seed_everything": "dstrat.data.random_state",
    "take_from_first_rank": "dstrat.parallel.collectives",
}

__all__ = [*_HOMES, "__version__"]  # noqa: PLE0604 - the keys of a table of strings

if not TYPE_CHECKING:
    _import, __dir__ = lazy_exports(__name__, _HOMES)

    def __getattr__(name: str) -> Any:
        if name == "__version__":
            from importlib.metadata import version

            return version("dstrat")
        if name in ("accelerators", "callbacks", "loggers", "plugins", "profilers", "strategies", "tuner", "utilities"):
            from importlib import import_module

            return import_module(f"dstrat.{name}")  # import dstrat as pl; pl.callbacks.EarlyStopping
        return _import(name)
