"""Cluster environments: base classes, the core's classes, and those of installed plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.builtin.clusters.external import ExternalEnvironment as ExternalEnvironment
    from dstrat.builtin.clusters.external import RankNames as RankNames
    from dstrat.builtin.clusters.kubeflow import KubeflowEnvironment as KubeflowEnvironment
    from dstrat.builtin.clusters.local import LocalEnvironment as LocalEnvironment
    from dstrat.builtin.clusters.lsf import LSFEnvironment as LSFEnvironment
    from dstrat.builtin.clusters.mpi import MPIEnvironment as MPIEnvironment
    from dstrat.builtin.clusters.plain import PlainEnvironment as PlainEnvironment
    from dstrat.builtin.clusters.slurm import SLURMEnvironment as SLURMEnvironment
    from dstrat.builtin.clusters.torchelastic import TorchElasticEnvironment as TorchElasticEnvironment
    from dstrat.interfaces.cluster import ClusterEnvironment as ClusterEnvironment

    def __getattr__(name: str) -> Any: ...  # a class of an installed plugin


_HOMES = {
    "ClusterEnvironment": "dstrat.interfaces.cluster",
    "ExternalEnvironment": "dstrat.builtin.clusters.external",
    "KubeflowEnvironment": "dstrat.builtin.clusters.kubeflow",
    "LSFEnvironment": "dstrat.builtin.clusters.lsf",
    "LocalEnvironment": "dstrat.builtin.clusters.local",
    "MPIEnvironment": "dstrat.builtin.clusters.mpi",
    "PlainEnvironment": "dstrat.builtin.clusters.plain",
    "RankNames": "dstrat.builtin.clusters.external",
    "SLURMEnvironment": "dstrat.builtin.clusters.slurm",
    "TorchElasticEnvironment": "dstrat.builtin.clusters.torchelastic",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, ("cluster_environment",))
