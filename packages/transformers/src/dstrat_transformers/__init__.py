"""Models of Hugging Face transformers in dstrat's Trainer and loops, and strategies in transformers' Trainer.

Importing it brings in neither torch nor transformers.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_transformers.accelerate import DstratAccelerator
    from dstrat_transformers.data import SplitIterableDataset
    from dstrat_transformers.generation import GenerationCallback
    from dstrat_transformers.module import HFModule
    from dstrat_transformers.optimization import make_optimizer, make_scheduler, weight_decay_groups
    from dstrat_transformers.saving import PretrainedCheckpoint, save_pretrained
    from dstrat_transformers.session import use
    from dstrat_transformers.streaming import stream_pretrained
    from dstrat_transformers.tensor_parallel import parallelize
    from dstrat_transformers.trainer import DstratTrainer, with_strategy

__all__ = [
    "DstratAccelerator",
    "DstratTrainer",
    "GenerationCallback",
    "HFModule",
    "PretrainedCheckpoint",
    "SplitIterableDataset",
    "make_optimizer",
    "make_scheduler",
    "parallelize",
    "save_pretrained",
    "stream_pretrained",
    "use",
    "weight_decay_groups",
    "with_strategy",
]

_HOMES = {
    "DstratAccelerator": "dstrat_transformers.accelerate",
    "DstratTrainer": "dstrat_transformers.trainer",
    "GenerationCallback": "dstrat_transformers.generation",
    "HFModule": "dstrat_transformers.module",
    "PretrainedCheckpoint": "dstrat_transformers.saving",
    "SplitIterableDataset": "dstrat_transformers.data",
    "make_optimizer": "dstrat_transformers.optimization",
    "make_scheduler": "dstrat_transformers.optimization",
    "parallelize": "dstrat_transformers.tensor_parallel",
    "save_pretrained": "dstrat_transformers.saving",
    "stream_pretrained": "dstrat_transformers.streaming",
    "use": "dstrat_transformers.session",
    "weight_decay_groups": "dstrat_transformers.optimization",
    "with_strategy": "dstrat_transformers.trainer",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
