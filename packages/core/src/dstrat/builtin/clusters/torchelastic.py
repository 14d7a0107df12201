"""Cluster environment of processes that torchrun started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.builtin.clusters.external import ExternalEnvironment, RankNames

if TYPE_CHECKING:
    from collections.abc import Mapping


class TorchElasticEnvironment(ExternalEnvironment):
    """Ranks of torchrun, also if a scheduler has started torchrun."""

    names = RankNames(
        world_size="WORLD_SIZE",
        global_rank="RANK",
        local_rank="LOCAL_RANK",
        local_size="LOCAL_WORLD_SIZE",
        node_rank="GROUP_RANK",
    )
    hint = "start the script with torchrun, and leave the variables that it sets as they are"

    restart_option = "torchrun --max-restarts"

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        return "TORCHELASTIC_RUN_ID is set" if "TORCHELASTIC_RUN_ID" in environ else None

    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        return f"torchrun --nnodes={num_nodes} --nproc-per-node={num_devices}"

    @property
    def store_is_served(self) -> bool:
        return self.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"

    @property
    def attempt(self) -> int:
        name = "TORCHELASTIC_RESTART_COUNT"
        return self.variables.integer(name) if name in self.environ else 0

    @property
    def job_id(self) -> str | None:
        name = self.environ.get("TORCHELASTIC_RUN_ID", "none")
        return None if name == "none" else f"torchrun-{name}"  # "none" is the default of --rdzv-id
