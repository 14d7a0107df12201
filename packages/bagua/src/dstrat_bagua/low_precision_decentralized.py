"""Low-precision decentralized SGD: compressed changes of weights, exchanged with two neighbors in a ring."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dstrat_bagua.algorithm import Algorithm, check_count, check_flag, check_real
from dstrat_bagua.buckets import divide_into_buckets
from dstrat_bagua.compression import compress, decompress

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from dstrat_bagua.algorithm import Replica
    from dstrat_bagua.buckets import Bucket


class _Copies:
    """Weights of a bucket as of the last exchange: those of this rank, and those of its two neighbors.

    Args:
        bucket: The bucket, with equal weights on all ranks.
    """

    def __init__(self, bucket: Bucket) -> None:
        bucket.load_weights()  # the same on all ranks at the start, so that nothing is exchanged for the copies
        self.local, self.previous, self.following = (bucket.flat.clone() for _ in range(3))


class LowPrecisionDecentralizedAlgorithm(Algorithm):
    r"""Average of weights with the two neighbors in a ring, of which compressed changes are sent.

    After each optimizer step, with the new weights :math:`x`, and :math:`w, l, r` the weights of this rank and of its
    previous and following one as of the last exchange, a rank sends :math:`d = Q(x + l/3 + r/3 - 5w/3)` to both
    neighbors, eight bits per value, and all add it to their copies: :math:`w \leftarrow w + d`, and the same for
    :math:`l` and :math:`r`; then :math:`x = w`.  Tang et al., Communication Compression for Decentralized Training,
    https://arxiv.org/abs/1803.06443.

    Args:
        hierarchical: Whether the ranks of a machine average first, and the ring is one of machines.
        communication_interval: Number of optimizer steps from one exchange to the next.

    Raises:
        MisuseError: ``hierarchical`` is not True or False.
        RequestError: The interval is not a number of steps.
    """

    replicas_differ = True
    weight_copies = 4

    def __init__(self, hierarchical: bool = True, communication_interval: int = 1) -> None:
        self.hierarchical = check_flag("hierarchical", hierarchical)
        self.communication_interval = check_count(
            "communication_interval", communication_interval, least=1, unit="optimizer steps"
        )

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        check_real(replica, "low_precision_decentralized")
        self._ranks = replica.open_ranks(hierarchical=self.hierarchical)
        self._buckets = divide_into_buckets(replica.parameters.values())
        self._copies: list[_Copies] = []

    def before_forward(self) -> None:
        if not self._copies:  # not in setup, after which a checkpoint may be loaded
            self._copies = [_Copies(bucket) for bucket in self._buckets]

    @torch.no_grad()
    def after_step(self) -> None:
        if (self.replica.steps - 1) % self.communication_interval:
            return
        for bucket, copies in zip(self._buckets, self._copies, strict=True):
            bucket.load_weights()
            self._ranks.run(lambda values, copies=copies: self._exchange(values, copies), bucket.flat)  # type: ignore[misc]  # of a default
            bucket.store_weights()

    def _exchange(self, values: Tensor, copies: _Copies) -> None:
        change = values + copies.previous / 3 + copies.following / 3 - copies.local * 5 / 3
        sent = compress(change[None])
        from_previous, from_following = self._send_to_neighbors(sent)
        copies.previous += decompress(from_previous, values.dtype)[0]
        copies.following += decompress(from_following, values.dtype)[0]
        copies.local += decompress(sent, values.dtype)[0]  # rounded, as the neighbors get it
        values.copy_(copies.local)  # what the neighbors have of this rank, or the copies would drift apart

    def _send_to_neighbors(self, sent: Tensor) -> tuple[Tensor, Tensor]:
        """Return what the previous and the following rank have sent."""
        ranks = self._ranks
        previous, following = (ranks.members[(ranks.rank + shift) % ranks.size] for shift in (-1, 1))
        received = ranks.exchange(sent, (previous, following))  # one message in a ring of two
        return received[previous], received[following]

    def rank_state(self) -> dict[str, Any]:
        return {
            f"{name} of bucket {index}": tensor
            for index, copies in enumerate(self._copies)
            for name, tensor in vars(copies).items()
        }

    def load_rank_state(self, state: Mapping[str, Any]) -> None:
        if not state:  # saved before the first step
            return
        self._copies = [_Copies(bucket) for bucket in self._buckets]
        for index, copies in enumerate(self._copies):
            for name, tensor in vars(copies).items():
                tensor.copy_(state[f"{name} of bucket {index}"])
