"""Cluster environment of workers that Ray Train started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.builtin.clusters.external import ExternalEnvironment, RankNames

if TYPE_CHECKING:
    from collections.abc import Mapping

_EVIDENCE = {"RAY_JOB_ID", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"}


class RayTrainEnvironment(ExternalEnvironment):
    """Ranks of Ray Train, in the variables that ``TorchTrainer`` sets in its workers.

    ``TorchTrainer`` has opened a process group by then, which the strategy uses.  Ray counts ranks machine by machine;
    with several machines the Trainer needs ``num_nodes``, and as many workers on each of them.
    """

    names = RankNames(
        world_size="WORLD_SIZE",
        global_rank="RANK",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node_rank="NODE_RANK",
    )
    hint = "construct the Trainer in the function of a TorchTrainer, and leave the variables that Ray sets as they are"

    restart_option = "RunConfig(failure_config=FailureConfig(max_failures=...)) of Ray Train"

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        return "a worker of Ray Train: RAY_JOB_ID and RANK are set" if environ.keys() >= _EVIDENCE else None

    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        strategy = "STRICT_PACK" if num_nodes == 1 else "SPREAD"
        workers = num_devices * num_nodes
        return f"ScalingConfig(num_workers={workers}, placement_strategy={strategy!r}) in the TorchTrainer"
