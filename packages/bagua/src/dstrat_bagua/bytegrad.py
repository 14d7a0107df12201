"""ByteGrad: averages of gradients that are compressed to eight bits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat_bagua.algorithm import Algorithm, check_flag, check_real
from dstrat_bagua.compression import average_compressed

if TYPE_CHECKING:
    from torch import Tensor

    from dstrat_bagua.algorithm import Replica
    from dstrat_bagua.buckets import Bucket, Work


class ByteGradAlgorithm(Algorithm):
    """Average of gradients, of which one byte per value is sent, a quarter of float32.

    Each bucket is cut into a chunk for every rank.  Chunks are compressed by their minimum and maximum, scattered,
    averaged, compressed again and gathered.  Gan et al., BAGUA: Scaling up Distributed Learning with System
    Relaxations, https://arxiv.org/abs/2107.01499.

    Args:
        hierarchical: Whether the ranks of a machine average without compression first, and then the machines with it.
            On a single machine nothing is compressed then.
        average: Whether gradients are averaged; otherwise they are summed.

    Raises:
        MisuseError: An option is not True or False.
    """

    def __init__(self, hierarchical: bool = True, average: bool = True) -> None:
        self.hierarchical = check_flag("hierarchical", hierarchical)
        self.average = check_flag("average", average)

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        check_real(replica, "bytegrad")
        self._ranks, self._thread = replica.open_ranks(hierarchical=self.hierarchical), replica.start_thread()

    def reduce_gradients(self, bucket: Bucket) -> Work:
        return self._thread.submit(self._reduce, bucket.flat)

    def _reduce(self, flat: Tensor) -> None:
        self._ranks.run(lambda values: average_compressed(values, self._ranks.group), flat)
        if not self.average:
            flat.mul_(self.replica.world_size)
