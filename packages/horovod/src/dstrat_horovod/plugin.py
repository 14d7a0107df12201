"""Records of the components of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_HOROVOD = Component(
    kind="strategy",
    alias="horovod",
    target="dstrat_horovod.strategy:HorovodStrategy",
    summary="one process per device, gradients averaged by Horovod during the backward pass",
    requires=("horovod>=0.28.1,<0.29",),
    requires_note="it is compiled for minutes; the README of dstrat-horovod has the command for today's torch",
    options={"start_method": "popen"},
    device_types=("cpu", "cuda"),
    precisions=("32-true", "64-true", "16-true", "16-mixed", "bf16-mixed"),  # Horovod cannot reduce bfloat16
    uses_torch_distributed=False,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)

_HOROVODRUN = Component(
    kind="cluster_environment",
    alias="horovodrun",
    target="dstrat_horovod.cluster:HorovodEnvironment",
    summary="processes that horovodrun started",
    evidence_variables=("HOROVOD_RANK",),
    auto=65,  # inside a task of a scheduler, and after torchrun and dstrat's own launcher, which run inside it
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the components of the family."""
    return [_HOROVOD, _HOROVODRUN]
