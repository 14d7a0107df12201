"""Communication of a rank under ZeRO, by its stage and configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dstrat.interfaces.communication import Collective, CommunicationLayout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.memory import TrainingSize

# DeepSpeed's defaults, in elements
_BUCKET = 500_000_000
_PERSISTENT = 100_000  # largest parameter of stage 3 that each rank keeps
_MOST_LIVE = 1_000_000_000
_PREFETCHED = 50_000_000


def zero_communication(training: TrainingSize, config: Mapping[str, Any]) -> CommunicationLayout:
    """Return what a rank communicates in an optimizer step (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).

    Args:
        training: Sizes of the training on one device, in DeepSpeed's precision.
        config: DeepSpeed's configuration.
    """
    zero, ranks = config["zero_optimization"], training.world_size
    size, batches = training.trainable_parameters, training.accumulate_grad_batches
    overlaps = bool(zero.get("overlap_comm"))
    bucket = int(zero.get("reduce_bucket_size", _BUCKET))
    buckets = math.ceil(training.trainable_numel / bucket)
    # Gradients are copied into a bucket and scaled there, and a shard of them is copied out.
    if zero["stage"] < 3:
        times = batches if zero["stage"] == 2 else 1  # stage 2 keeps no whole gradients until the last batch
        gradients = Collective(
            kind="all_reduce",
            bytes=times * size,
            messages=times * buckets,
            ranks=ranks,
            overlaps=overlaps,
            in_each_batch=zero["stage"] == 2,
        )
        gathered = math.ceil(training.trainable_numel / int(zero.get("allgather_bucket_size", _BUCKET)))
        parameters = Collective(kind="all_gather", bytes=size, messages=gathered, ranks=ranks)
        if not zero["stage"]:
            return CommunicationLayout(collectives=(gradients,), copied=4 * size)
        # Hooks of parameters fill the buckets; measured with DeepSpeed 0.19 on a CPU.
        hooks = 3 * batches * sum(one.requires_grad for one in training.module.parameters())
        return CommunicationLayout(
            collectives=(gradients, parameters),
            copied=times * 4 * size + 4 * size // ranks,
            allocated=times * size // max(1, buckets),  # a new bucket in each backward pass
            hooks=hooks,
        )
    threshold = int(zero.get("stage3_param_persistence_threshold", _PERSISTENT))
    persistent = [one for one in training.module.parameters() if one.numel() <= threshold]
    sharded = [one for one in training.module.parameters() if one.numel() > threshold]
    numel = sum(one.numel() for one in sharded)
    # Small models stay gathered between the forward and the backward pass.
    passes = batches * (1 if numel <= int(zero.get("stage3_max_live_parameters", _MOST_LIVE)) else 2)
    prefetches = math.ceil(numel / int(zero.get("stage3_prefetch_bucket_size", _PREFETCHED)))
    gradients = Collective(
        kind="reduce_scatter",
        bytes=batches * size,
        messages=batches * buckets,
        ranks=ranks,
        overlaps=overlaps,
        in_each_batch=True,
    )
    parameters = Collective(
        kind="all_gather",
        bytes=sum(one.nbytes for one in persistent) + passes * sum(one.nbytes for one in sharded),
        messages=len(persistent) + passes * prefetches,
        ranks=ranks,
        overlaps=True,
        in_each_batch=True,
    )
    # Besides gradients, shards are copied into the outputs of gathers, these into parameters, and the shards into
    # parameters after the step.
    copied = batches * 4 * size + (4 + 2 * passes) * size // ranks + 2 * passes * sum(one.nbytes for one in sharded)
    # Measured with DeepSpeed 0.19 on a CPU: hooks of layers and parameters in each pass, and the optimizer's step.
    hooks = (2 * 6 * batches + 2) * (len(persistent) + len(sharded))
    return CommunicationLayout(collectives=(gradients, parameters), copied=copied, hooks=hooks)
