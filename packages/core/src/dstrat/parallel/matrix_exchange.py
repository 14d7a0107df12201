"""Exchange of sharded matrices: each is gathered on one rank, and a result of its shape goes back to the shards."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from dstrat.parallel.shards import boxes_at, is_distributed, local_boxes

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from dstrat.parallel.shards import Extent


@dataclass(frozen=True, kw_only=True, slots=True)
class Route:
    """The way of a sharded matrix.

    Attributes:
        rank: The rank that computes with it.
        extents: The boxes of each rank that has a shard of this replica, by rank.
    """

    rank: int
    extents: Mapping[int, Sequence[Extent]]


def plan_routes(matrices: Sequence[Any]) -> list[Route]:
    """Return the routes of matrices, whose work is divided among the ranks that have shards of them.

    Args:
        matrices: DTensors, in the same order on all ranks that have a shard of them.
    """
    loads: dict[tuple[int, ...], dict[int, int]] = {}  # work of ranks, by those that share a replica
    routes = []
    for matrix in matrices:
        extents = extents_of(matrix)
        work = loads.setdefault(tuple(extents), dict.fromkeys(extents, 0))
        rank = min(work, key=work.__getitem__)  # the first of those, so that all ranks agree
        work[rank] += matrix.numel() * min(matrix.shape, default=1)
        routes.append(Route(rank=rank, extents=extents))
    return routes


def extents_of(tensor: Any) -> dict[int, list[Extent]]:
    """Return the boxes of each rank that has a shard of this rank's replica of a DTensor, by rank."""
    mesh, position = tensor.device_mesh.mesh, tensor.device_mesh.get_coordinate()
    axes = [
        (at,) if placement.is_replicate() else range(size)
        for placement, at, size in zip(tensor.placements, position, mesh.shape, strict=True)
    ]
    return {int(mesh[coordinate]): boxes_at(tensor, coordinate) for coordinate in itertools.product(*axes)}


def with_placements_of(gradient: Any, parameter: Any) -> Any:
    """Return a gradient with the placements of its parameter: one may be summands of the ranks."""
    if not is_distributed(gradient) or gradient.placements == parameter.placements:
        return gradient
    return gradient.redistribute(placements=parameter.placements)


class MatrixExchange:
    """Gathers each of several sharded matrices on one rank, and sends results back.

    Each of n ranks computes about an n-th, and sends and receives about as many elements as it has.  Replicas of
    shards do the same side by side.

    Args:
        matrices: DTensors with this rank's shards.
        routes: Their routes.
        dtype: The dtype in which elements are sent.
        device: Device of the shards.

    Attributes:
        full: The full matrices that this rank computes with, by index; to be overwritten by results.
    """

    def __init__(
        self, matrices: Sequence[Any], routes: Sequence[Route], dtype: torch.dtype, device: torch.device
    ) -> None:
        self._dtype, self._device = dtype, device
        self.full: dict[int, Tensor] = {}
        # By the rank to which they go, or from which they come: this rank's shards, and boxes of the full matrices.
        self._shards: dict[int, list[Tensor]] = defaultdict(list)
        self._boxes: dict[int, list[Tensor]] = defaultdict(list)
        for index, (matrix, route) in enumerate(zip(matrices, routes, strict=True)):
            self._shards[route.rank] += [box.tensor for box in local_boxes(matrix)]
            if route.rank == dist.get_rank():
                full = self.full[index] = torch.empty(matrix.shape, dtype=dtype, device=device)
                for rank, extents in route.extents.items():
                    self._boxes[rank] += [full[extent.slices] for extent in extents]

    def gather(self) -> None:
        """Fill the full matrices; collective over all ranks of the job, also those without matrices."""
        self._send(self._shards, self._boxes)

    def scatter(self) -> None:
        """Overwrite the shards by those of the full matrices; collective likewise."""
        self._send(self._boxes, self._shards)

    def _send(self, sources: Mapping[int, Sequence[Tensor]], targets: Mapping[int, Sequence[Tensor]]) -> None:
        """Copy the sources for each rank to its targets for this one, in order."""
        ranks = range(dist.get_world_size())
        outgoing = [tensor.reshape(-1).to(self._dtype) for rank in ranks for tensor in sources.get(rank, ())]
        sent = torch.cat(outgoing) if outgoing else torch.empty(0, dtype=self._dtype, device=self._device)
        counts = [sum(target.numel() for target in targets.get(rank, ())) for rank in ranks]
        received = torch.empty(sum(counts), dtype=self._dtype, device=self._device)
        dist.all_to_all_single(
            received, sent, counts, [sum(source.numel() for source in sources.get(rank, ())) for rank in ranks]
        )
        incoming = [target for rank in ranks for target in targets.get(rank, ())]
        elements = received.split([target.numel() for target in incoming]) if incoming else ()
        for target, values in zip(incoming, elements, strict=True):
            target.copy_(values.view(target.shape))
