"""GradientAllReduce: gradients averaged over all ranks, as in DistributedDataParallel."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch.distributed as dist

from dstrat.interfaces.communication import Collective
from dstrat_bagua.algorithm import Algorithm, check_flag
from dstrat_bagua.buckets import BUCKET, FIRST_BUCKET

if TYPE_CHECKING:
    from torch import Tensor

    from dstrat.interfaces.memory import TrainingSize
    from dstrat_bagua.algorithm import Replica
    from dstrat_bagua.buckets import Bucket, Work


class GradientAllReduceAlgorithm(Algorithm):
    """Average of the gradients of all ranks, the algorithm of data-parallel training without compression.

    Gan et al., BAGUA: Scaling up Distributed Learning with System Relaxations, https://arxiv.org/abs/2107.01499.

    Args:
        hierarchical: Whether the ranks of a machine average first, and then the machines; the result is the same.
        average: Whether gradients are averaged; otherwise they are summed.

    Raises:
        MisuseError: An option is not True or False.
    """

    def __init__(self, hierarchical: bool = False, average: bool = True) -> None:
        self.hierarchical = check_flag("hierarchical", hierarchical)
        self.average = check_flag("average", average)

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        if self.hierarchical:
            self._ranks, self._thread = replica.open_ranks(hierarchical=True), replica.start_thread()

    def sent_gradients(self, training: TrainingSize) -> tuple[Collective, ...] | None:
        if self.hierarchical:
            return None
        size = training.trainable_parameters
        messages = 1 + math.ceil(max(0, size - FIRST_BUCKET) / BUCKET)
        return (Collective(kind="all_reduce", bytes=size, messages=messages, ranks=training.world_size, overlaps=True),)

    def reduce_gradients(self, bucket: Bucket) -> Work:
        if self.hierarchical:
            return self._thread.submit(self._reduce, bucket.flat)
        if self.average:  # before the sum, which may overflow in half precision
            bucket.flat.div_(self.replica.world_size)
        work: Work = dist.all_reduce(bucket.flat, async_op=True)
        return work

    def _reduce(self, flat: Tensor) -> None:
        self._ranks.run(self._ranks.average, flat)
        if not self.average:
            flat.mul_(self.replica.world_size)
