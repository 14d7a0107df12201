"""Decentralized SGD: weights averaged with all ranks, or with another one in each step."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from dstrat.errors import RequestError
from dstrat_bagua.algorithm import Algorithm, check_choice, check_count, check_flag
from dstrat_bagua.buckets import divide_into_buckets

if TYPE_CHECKING:
    from torch import Tensor

    from dstrat_bagua.algorithm import Replica
    from dstrat_bagua.buckets import Bucket
    from dstrat_bagua.communication import Exchange


class DecentralizedAlgorithm(Algorithm):
    r"""Average of weights instead of gradients, while forward and backward pass run.

    Each rank applies the gradient of its weights to the average of weights:
    :math:`x_{t+1} = avg(x_t) - step(\nabla f(x_t))`.  Lian et al., Can Decentralized Algorithms Outperform Centralized
    Algorithms?, https://arxiv.org/abs/1705.09056; with ``"shift_one"`` the other rank changes in each exchange, so that
    after as many exchanges as half of the ranks each rank of the first half has met each of the second.

    Args:
        hierarchical: Whether the ranks of a machine average first, and then the machines exchange weights.
        peer_selection_mode: ``"all"`` averages the weights of all ranks, ``"shift_one"`` those of two.
        communication_interval: Number of optimizer steps from one exchange to the next.

    Raises:
        MisuseError: ``hierarchical`` is not True or False.
        RequestError: Another option is not possible.
    """

    replicas_differ = True
    weight_copies = 1

    def __init__(
        self, hierarchical: bool = True, peer_selection_mode: str = "all", communication_interval: int = 1
    ) -> None:
        self.hierarchical = check_flag("hierarchical", hierarchical)
        self.peer_selection_mode = check_choice("peer_selection_mode", peer_selection_mode, ("all", "shift_one"))
        self.communication_interval = check_count(
            "communication_interval", communication_interval, least=1, unit="optimizer steps"
        )

    def setup(self, replica: Replica) -> None:
        super().setup(replica)
        self._ranks, self._thread = replica.open_ranks(hierarchical=self.hierarchical), replica.start_thread()
        if self.peer_selection_mode == "shift_one" and self._ranks.size > 1 and self._ranks.size % 2:
            unit = "machines" if self._ranks.size < replica.world_size else "ranks"
            raise RequestError(
                f"peer_selection_mode 'shift_one' pairs {unit}, and there are {self._ranks.size}: use an even number, "
                'or peer_selection_mode="all"'
            )
        self._buckets = divide_into_buckets(replica.parameters.values())
        self._pending: list[tuple[Bucket, Exchange]] = []

    def before_forward(self) -> None:
        # Pending are those of an earlier forward pass for the same optimizer step.
        if self._pending or self.replica.steps % self.communication_interval:
            return
        exchanges = self.replica.steps // self.communication_interval
        for bucket in self._buckets:
            bucket.load_weights()
            self._pending.append((bucket, self._thread.submit(self._exchange, bucket.flat, exchanges)))

    def before_step(self) -> None:
        for bucket, exchange in self._pending:
            exchange.wait()
            bucket.store_weights()  # after the backward pass, which needs the weights of the forward pass
        self._pending = []

    @torch.no_grad()
    def _exchange(self, flat: Tensor, exchanges: int) -> None:
        ranks = self._ranks

        def average_pair(values: Tensor) -> None:
            peer = ranks.members[shifted_peer(ranks.rank, ranks.size, exchanges)]
            values.add_(ranks.exchange(values, [peer])[peer]).div_(2)

        ranks.run(ranks.average if self.peer_selection_mode == "all" else average_pair, flat)


def shifted_peer(rank: int, size: int, exchanges: int) -> int:
    """Return the rank with which a rank averages.

    Args:
        rank: A rank.
        size: Number of ranks, an even one.
        exchanges: Number of exchanges so far.
    """
    half = size // 2
    return half + (rank + exchanges) % half if rank < half else (rank - half - exchanges) % half
