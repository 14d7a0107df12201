"""Records of the launcher and the cluster environment of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_LAUNCHER = Component(
    kind="launcher",
    alias="ray",
    target="dstrat_ray.launcher:RayLauncher",
    summary="one actor of a Ray cluster for each rank, on one or several machines",
    requires=("ray>=2.51",),  # the aliases are listed without it, where a distribution was installed without it
)
# After torchelastic: torchrun in an actor, as TorchX starts it, hands Ray's variables down to its ranks.  Before
# Kubeflow's and plain variables, which a worker has as well.
_RAY_TRAIN = Component(
    kind="cluster_environment",
    alias="ray_train",
    target="dstrat_ray.cluster:RayTrainEnvironment",
    summary="workers that Ray Train started",
    evidence_variables=("RAY_JOB_ID",),
    auto=65,
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the aliases of the launcher and the cluster environment."""
    return [_LAUNCHER, _RAY_TRAIN]
