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
# Nearer to the process than torchrun's variables, as a worker may inherit those; ranks of the launcher are local's.
_RAY_TRAIN = Component(
    kind="cluster_environment",
    alias="ray_train",
    target="dstrat_ray.cluster:RayTrainEnvironment",
    summary="workers that Ray Train started",
    auto=75,
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the aliases of the launcher and the cluster environment."""
    return [_LAUNCHER, _RAY_TRAIN]
