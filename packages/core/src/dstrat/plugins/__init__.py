"""The catalog of components; never imports torch.

The core's precision, checkpoint and cluster classes can be imported from here, and those of installed plugins from
``dstrat.plugins.precision``, ``dstrat.plugins.io`` and ``dstrat.plugins.environments``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.plugins.environments import ClusterEnvironment as ClusterEnvironment
    from dstrat.plugins.environments import ExternalEnvironment as ExternalEnvironment
    from dstrat.plugins.environments import KubeflowEnvironment as KubeflowEnvironment
    from dstrat.plugins.environments import LocalEnvironment as LocalEnvironment
    from dstrat.plugins.environments import LSFEnvironment as LSFEnvironment
    from dstrat.plugins.environments import MPIEnvironment as MPIEnvironment
    from dstrat.plugins.environments import PlainEnvironment as PlainEnvironment
    from dstrat.plugins.environments import RankNames as RankNames
    from dstrat.plugins.environments import SLURMEnvironment as SLURMEnvironment
    from dstrat.plugins.environments import TorchElasticEnvironment as TorchElasticEnvironment
    from dstrat.plugins.io import AsyncCheckpointIO as AsyncCheckpointIO
    from dstrat.plugins.io import CheckpointIO as CheckpointIO
    from dstrat.plugins.io import PortableCheckpointIO as PortableCheckpointIO
    from dstrat.plugins.io import TorchCheckpointIO as TorchCheckpointIO
    from dstrat.plugins.precision import MixedPrecision as MixedPrecision
    from dstrat.plugins.precision import Precision as Precision
    from dstrat.plugins.precision import TruePrecision as TruePrecision


_HOMES = {
    "AsyncCheckpointIO": "dstrat.plugins.io",
    "CheckpointIO": "dstrat.plugins.io",
    "ClusterEnvironment": "dstrat.plugins.environments",
    "ExternalEnvironment": "dstrat.plugins.environments",
    "KubeflowEnvironment": "dstrat.plugins.environments",
    "LSFEnvironment": "dstrat.plugins.environments",
    "LocalEnvironment": "dstrat.plugins.environments",
    "MPIEnvironment": "dstrat.plugins.environments",
    "MixedPrecision": "dstrat.plugins.precision",
    "PlainEnvironment": "dstrat.plugins.environments",
    "PortableCheckpointIO": "dstrat.plugins.io",
    "Precision": "dstrat.plugins.precision",
    "RankNames": "dstrat.plugins.environments",
    "SLURMEnvironment": "dstrat.plugins.environments",
    "TorchCheckpointIO": "dstrat.plugins.io",
    "TorchElasticEnvironment": "dstrat.plugins.environments",
    "TruePrecision": "dstrat.plugins.precision",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
