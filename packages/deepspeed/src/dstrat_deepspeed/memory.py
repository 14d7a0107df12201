"""Memory of a rank under ZeRO, by its stage and configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dstrat.interfaces.memory import MemoryLayout
from dstrat_deepspeed.validation import offload_devices

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.memory import TrainingSize

_FLOAT32 = 4  # bytes


def zero_layout(training: TrainingSize, config: dict[str, Any]) -> MemoryLayout:
    """Return the memory of a rank.

    Args:
        training: Sizes of the training on one device, in DeepSpeed's precision.
        config: DeepSpeed's configuration.
    """
    zero, itemsize = config["zero_optimization"], training.precision.param_dtype.itemsize
    if zero["stage"] == 0:
        return _without_sharding(training, itemsize)
    return _sharded(training, zero, itemsize, offload_devices(config))


def _without_sharding(training: TrainingSize, itemsize: int) -> MemoryLayout:
    layout, numel = training.replicated, training.trainable_numel
    copies = 0 if itemsize == _FLOAT32 else 2 * _FLOAT32 * numel  # of parameters, and of gradients
    return MemoryLayout(
        parameters=layout.parameters,
        gradients=layout.gradients,
        optimizer_state=_FLOAT32 // itemsize * layout.optimizer_state + copies,
        # Gradients are copied into one buffer to be reduced, after the backward pass.
        optimizer_temporaries=max(layout.optimizer_temporaries, training.trainable_parameters),
        accumulated=layout.accumulated,
    )


def _sharded(
    training: TrainingSize, zero: Mapping[str, Any], itemsize: int, devices: Mapping[str, str]
) -> MemoryLayout:
    numel, ranks, is_stage_3 = training.trainable_numel, training.world_size, zero["stage"] == 3
    is_stage_1, has_earlier = zero["stage"] == 1, training.accumulate_grad_batches > 1
    reduces_late = is_stage_1 and not zero.get("overlap_comm")  # after the last backward pass
    on_device = training.device_type != "cpu"  # whose memory is another one than that of the host
    offloads_optimizer = on_device and "offload_optimizer" in devices
    shard = math.ceil(training.trainable_parameters / ranks)
    copy = math.ceil(_FLOAT32 * numel / ranks)  # this rank's shard in float32, which the optimizer steps
    widened = _FLOAT32 * numel / max(1, training.trainable_parameters)  # the state is of the copies
    state = math.ceil(widened * training.optimizer_state / ranks)
    step = copy + math.ceil(training.optimizer_temporaries / ranks)

    # Gradients are collected in buckets, each of which is copied to be reduced.  Only buckets before the last one are
    # reduced while activations live.
    elements = int(zero.get("reduce_bucket_size", 500_000_000))
    collected = min(elements, numel) * itemsize
    # Memory of the host takes no pages until it is written: a bucket for all gradients grows with them.
    fills_bucket = not on_device and numel <= elements and not is_stage_3
    bucket = elements * itemsize if on_device else collected
    reduced_in_backward = collected if numel > elements else 0

    frozen = training.frozen_parameters
    if is_stage_3:
        frozen = math.ceil(frozen / ranks)
        # Parameters that will be used again soon stay gathered, so that those of small models are never freed.  They
        # are copies of a gathered buffer, which lives until the last parameter in it has been used.
        live = int(zero.get("stage3_max_live_parameters", 1_000_000_000)) * itemsize
        prefetched = int(zero.get("stage3_prefetch_bucket_size", 50_000_000)) * itemsize
        working = min(live, training.parameters) + min(prefetched, training.parameters)
        in_step = min(live, training.parameters) + collected
    else:
        working = bucket * (2 if zero.get("overlap_comm") and on_device else 1)
        in_step = working + collected - (0 if offloads_optimizer else shard)  # the reduced gradients reuse it
    parameters = (shard if is_stage_3 else training.trainable_parameters) + frozen
    on_host = 0
    if offloads_optimizer:
        on_host = _host_of_optimizer(training, devices, copy + state, copy, shard=shard, is_stage_3=is_stage_3)
    if is_stage_3 and on_device and "offload_param" in devices:
        on_host += parameters if devices["offload_param"] == "cpu" else 0
        parameters = 0
    gradients = training.trainable_parameters if fills_bucket or reduces_late else shard
    in_step -= gradients - shard
    # Stage 2 adds reduced gradients to those of earlier batches, and keeps both.
    earlier = shard if zero["stage"] == 2 and has_earlier and not offloads_optimizer else 0
    # Stage 1 reduces nothing before the last batch.
    accumulated = training.trainable_parameters if is_stage_1 and has_earlier else 0
    if is_stage_3 and not offloads_optimizer:
        accumulated = shard  # a buffer that stays between steps
    has_copy = is_stage_3 or itemsize < _FLOAT32  # stages 1 and 2 step parameters in float32 themselves
    return MemoryLayout(
        parameters=parameters + training.module_buffers,
        gradients=0 if offloads_optimizer and not reduces_late else gradients,
        optimizer_state=0 if offloads_optimizer else state + (copy if has_copy else 0),
        optimizer_temporaries=max(0 if offloads_optimizer else step, in_step) + earlier,
        accumulated=accumulated,
        buffers=bucket if is_stage_3 else training.largest_parameter if offloads_optimizer else 0,
        step_buffers=(0 if fills_bucket or reduces_late else working + reduced_in_backward) + earlier,
        host=on_host,
    )


def _host_of_optimizer(
    training: TrainingSize, devices: Mapping[str, str], stepped: int, gradients: int, *, shard: int, is_stage_3: bool
) -> int:
    """Return the memory of a rank on the host for an offloaded optimizer; buffers for files on NVMe are not counted.

    Args:
        training: Sizes of the training.
        devices: Device of each part that is offloaded.
        stepped: Bytes of the copies in float32 that are stepped, and of their state.
        gradients: Bytes of the gradients of these copies.
        shard: Bytes of the rank's shard of the trainable parameters.
        is_stage_3: Whether parameters are sharded.
    """
    size = stepped + gradients if devices["offload_optimizer"] == "cpu" else 0
    if is_stage_3:
        return size + shard  # gradients of all batches are accumulated there
    accumulated = shard if training.accumulate_grad_batches > 1 else 0
    # With a buffer for stepped parameters, and one for a gradient.
    return size + shard + accumulated + training.largest_parameter
