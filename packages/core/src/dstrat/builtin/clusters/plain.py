"""Cluster environment of ranks in plain environment variables."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.builtin.clusters.external import ExternalEnvironment, RankNames

if TYPE_CHECKING:
    from collections.abc import Mapping


class PlainEnvironment(ExternalEnvironment):
    """Ranks in the variables of torch.distributed, set by hand or by any scheduler.

    They are ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``MASTER_ADDR`` and ``MASTER_PORT``; on several machines also
    ``NODE_RANK``, or ``LOCAL_WORLD_SIZE`` if ranks are counted machine by machine.
    """

    names = RankNames(
        world_size="WORLD_SIZE",
        global_rank="RANK",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node_rank="NODE_RANK",
    )
    hint = (
        "set RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT for each process "
        "(NODE_RANK too on several machines), or none of them"
    )

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        return "RANK and WORLD_SIZE are set" if {"RANK", "WORLD_SIZE"} <= environ.keys() else None

    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        world_size = num_devices * num_nodes
        return f"WORLD_SIZE={world_size}, RANK from 0 to {world_size - 1} and LOCAL_RANK from 0 to {num_devices - 1}"
