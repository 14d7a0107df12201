"""Memory of a rank under ZeRO, by its stage and configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.interfaces.memory import MemoryLayout

if TYPE_CHECKING:
    import torch

    from dstrat.interfaces.memory import TrainingSize

_FLOAT32 = 4  # bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class _Sizes:
    """Sizes of a training in bytes, as ZeRO divides them."""

    parameters: int  # trainable ones in the dtype that is computed in
    frozen: int
    shard: int  # of the parameters
    copy: int  # this rank's shard in float32, which the optimizer steps
    state: int  # of the optimizer, this rank's
    bucket: int  # into which gradients are collected
    reduced_in_backward: int  # copy of a bucket that is reduced when it is full, while activations live
    reduced_at_end: int  # copy of the last bucket; of a small model it is the only one


def zero_layout(training: TrainingSize, config: Mapping[str, Any]) -> MemoryLayout:
    """Return the memory of a rank.

    Args:
        training: Sizes of the training on one device, in DeepSpeed's precision.
        config: DeepSpeed's configuration.
    """
    zero = config["zero_optimization"]
    stage = zero["stage"]
    if stage == 0:
        return _without_sharding(training)
    sizes = _sizes(training, zero)
    return _of_stage_3(training, zero, sizes) if stage == 3 else _of_stage_1_and_2(training, zero, sizes)


def _sizes(training: TrainingSize, zero: Mapping[str, Any]) -> _Sizes:
    numel, ranks = training.trainable_numel, training.world_size
    shard = math.ceil(training.trainable_parameters / ranks)
    copy = math.ceil(_FLOAT32 * numel / ranks)
    widened = _FLOAT32 * numel / max(1, training.trainable_parameters)  # the state is of the copies
    elements = int(zero.get("reduce_bucket_size", 500_000_000))
    collected = min(elements, numel) * _itemsize(training)
    # Memory of the host that is never written takes no pages.
    bucket = collected if training.device_type == "cpu" else elements * _itemsize(training)
    return _Sizes(
        parameters=training.trainable_parameters,
        frozen=training.frozen_parameters + training.module_buffers,
        shard=shard,
        copy=copy,
        state=math.ceil(widened * training.optimizer_state / ranks),
        bucket=bucket,
        reduced_in_backward=collected if numel > elements else 0,
        reduced_at_end=collected,
    )


def _without_sharding(training: TrainingSize) -> MemoryLayout:
    layout, numel = training.replicated, training.trainable_numel
    # Gradients are copied into one buffer to be reduced, after the backward pass.
    temporary = max(layout.optimizer_temporaries, training.trainable_parameters)
    copies = 0 if _itemsize(training) == _FLOAT32 else 2 * _FLOAT32 * numel  # of parameters, and of gradients
    return MemoryLayout(
        parameters=layout.parameters,
        gradients=layout.gradients,
        optimizer_state=_FLOAT32 // _itemsize(training) * layout.optimizer_state + copies,
        optimizer_temporaries=temporary,
    )


def _of_stage_1_and_2(training: TrainingSize, zero: Mapping[str, Any], sizes: _Sizes) -> MemoryLayout:
    on_device = training.device_type != "cpu"
    buckets = sizes.bucket * (2 if zero.get("overlap_comm") and on_device else 1)
    copy = sizes.copy if _itemsize(training) < _FLOAT32 else 0  # in float32 the optimizer steps the parameters
    temporaries = math.ceil(training.optimizer_temporaries / training.world_size)
    if _offloads(zero, "offload_optimizer") and on_device:
        return MemoryLayout(
            parameters=sizes.parameters + sizes.frozen,
            gradients=0,
            optimizer_state=0,
            optimizer_temporaries=buckets + sizes.reduced_at_end,
            buffers=training.largest_parameter,
            step_buffers=buckets + sizes.reduced_in_backward,
            host=2 * sizes.copy + sizes.state + sizes.shard,
        )
    return MemoryLayout(
        parameters=sizes.parameters + sizes.frozen,
        gradients=sizes.shard,
        optimizer_state=copy + sizes.state,
        optimizer_temporaries=max(sizes.copy + temporaries, buckets + sizes.reduced_at_end - sizes.shard),
        step_buffers=buckets + sizes.reduced_in_backward,
    )


def _of_stage_3(training: TrainingSize, zero: Mapping[str, Any], sizes: _Sizes) -> MemoryLayout:
    # Parameters that will be used again soon stay gathered, so that those of small models are never freed.
    live = int(zero.get("stage3_max_live_parameters", 1_000_000_000)) * _itemsize(training)
    gathered = min(live, training.parameters)
    frozen = math.ceil(training.frozen_parameters / training.world_size) + training.module_buffers
    on_device = training.device_type != "cpu"
    offloads_optimizer = on_device and _offloads(zero, "offload_optimizer")
    offloads_parameters = on_device and _offloads(zero, "offload_param")
    state = sizes.copy + sizes.state
    temporaries = math.ceil(training.optimizer_temporaries / training.world_size)
    step = 0 if offloads_optimizer else sizes.copy + temporaries
    on_host = (sizes.shard + frozen if offloads_parameters else 0) + (
        sizes.shard + state + sizes.copy if offloads_optimizer else 0
    )
    return MemoryLayout(
        parameters=0 if offloads_parameters else sizes.shard + frozen,
        gradients=0 if offloads_optimizer else sizes.shard,
        optimizer_state=0 if offloads_optimizer else state,
        optimizer_temporaries=max(step, gathered + sizes.reduced_at_end),
        buffers=sizes.bucket,
        step_buffers=gathered + sizes.reduced_in_backward,
        host=on_host,
    )


def _offloads(zero: Mapping[str, Any], section: str) -> bool:
    """Return whether something is on the CPU or in files."""
    values = zero.get(section)
    return isinstance(values, Mapping) and values.get("device", "none") != "none"


def _itemsize(training: TrainingSize) -> int:
    dtype: torch.dtype = training.precision.param_dtype
    return dtype.itemsize
