"""Records of the components of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_MESH = Component(
    kind="strategy",
    alias="mesh",
    target="dstrat_mesh.strategy:MeshStrategy",
    summary="stages, replicas, shards, sequences and split layers on a mesh of devices, from one option",
    options={"start_method": "popen"},
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the alias of the family."""
    return [_MESH]
