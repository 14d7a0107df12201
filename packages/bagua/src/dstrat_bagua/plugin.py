"""Record of the component of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_BAGUA = Component(
    kind="strategy",
    alias="bagua",
    target="dstrat_bagua.strategy:BaguaStrategy",
    summary="one process per device; algorithms that send fewer bytes, or wait less",
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
    return [_BAGUA]
