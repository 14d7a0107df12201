"""Cluster environment of pods that Kubeflow's training operator started."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.builtin.clusters.external import ExternalEnvironment, RankNames

if TYPE_CHECKING:
    from collections.abc import Mapping


class KubeflowEnvironment(ExternalEnvironment):
    """One process in each pod of a PyTorchJob, which counts as a machine of its own.

    A pod that runs several processes starts them with torchrun, and is torchrun's then.
    """

    # There is no variable for the local rank: the property below replaces it, and messages name RANK.
    names = RankNames(world_size="WORLD_SIZE", global_rank="RANK", local_rank="RANK", node_rank="RANK")
    hint = "start the script in a pod of a PyTorchJob, which sets RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT"

    restart_option = "restartPolicy: OnFailure of the PyTorchJob"

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        needed = {"KUBERNETES_PORT", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}
        # torchrun, or variables set by hand, in a pod have LOCAL_RANK.
        if "LOCAL_RANK" in environ or not needed <= environ.keys():
            return None
        return "KUBERNETES_PORT is set, and RANK without LOCAL_RANK"

    @property
    def local_rank(self) -> int:
        return 0

    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        if num_devices > 1:
            return f"torchrun --nnodes={num_nodes} --nproc-per-node={num_devices} in each pod"
        return f"a PyTorchJob of {num_nodes} replicas"
