"""Communication of a rank under ZeRO, by its stage and configuration."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from dstrat.interfaces.communication import Collective, CommunicationLayout
from dstrat_deepspeed.validation import offload_devices

if TYPE_CHECKING:
    from dstrat.interfaces.memory import TrainingSize

# DeepSpeed's defaults, in elements
_BUCKET = 500_000_000
_PERSISTENT = 100_000  # largest parameter of stage 3 that each rank keeps
_MOST_LIVE = 1_000_000_000
_PREFETCHED = 50_000_000


def zero_communication(training: TrainingSize, config: dict[str, Any]) -> CommunicationLayout | None:
    """Return what a rank communicates in an optimizer step (Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054).

    Args:
        training: Sizes of the training on one device, in DeepSpeed's precision.
        config: DeepSpeed's configuration.

    Returns:
        What it communicates; None if something is in files on NVMe, whose speed is not known.
    """
    if "nvme" in offload_devices(config).values():
        return None
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
            copied_from_host=_copied_from_host(training, config, gathers=0),
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
    from_host = _copied_from_host(training, config, gathers=passes * sum(one.nbytes for one in sharded))
    return CommunicationLayout(
        collectives=(gradients, parameters), copied=copied, copied_from_host=from_host, hooks=hooks
    )


def _copied_from_host(training: TrainingSize, config: dict[str, Any], *, gathers: int) -> int:
    """Return the bytes that a rank copies between host and device, besides two copies of what it has on the host.

    DeepSpeed 0.19 copies each shard to the device for each gather.  Gradients of several batches are accumulated on the
    device, and are on the host between them: each batch copies them there and, in stage 3 also of a single batch, back.

    Args:
        training: Sizes of the training on one device.
        config: DeepSpeed's configuration.
        gathers: Bytes of the parameters that all ranks gather in a step.
    """
    devices, stage = offload_devices(config), config["zero_optimization"]["stage"]
    if not devices or training.device_type == "cpu":
        return 0  # a CPU is device and host
    ranks, batches = training.world_size, training.accumulate_grad_batches
    parameters = training.parameters // ranks
    again = max(0, gathers // ranks - parameters) if stage == 3 and "offload_param" in devices else 0
    if "offload_optimizer" not in devices or batches == 1 or stage == 1:
        return again
    copies = 2 * (batches - 1) if stage == 3 else 2 * batches - 3
    return again + copies * training.trainable_parameters // ranks
