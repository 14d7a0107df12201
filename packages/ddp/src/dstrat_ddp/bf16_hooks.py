"""Communication in bfloat16 on any device: torch's own hook and wrapper ask for NCCL."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from dstrat_ddp.comm_hooks import Hook


def average_bf16(state: dist.ProcessGroup | None, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """Average the gradients of a bucket in bfloat16.

    Args:
        state: The processes to average over; None is all of them.
        bucket: The gradients of this rank.
    """
    buffer = bucket.buffer()
    compressed = buffer.to(torch.bfloat16).div_(dist.get_world_size(state))
    future = dist.all_reduce(compressed, group=state, async_op=True).get_future()
    averaged: torch.futures.Future[torch.Tensor] = future.then(lambda done: buffer.copy_(done.value()[0]))
    return averaged


def bf16_around(hook: Hook) -> Hook:
    """Return a hook that gives the given one bfloat16 instead of the gradients' dtype."""

    def compressing(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        buffer = bucket.buffer()
        bucket.set_buffer(buffer.to(torch.bfloat16))
        return hook(state, bucket).then(lambda done: buffer.copy_(done.value()))

    return compressing
