"""Record of the strategy of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_DILOCO = Component(
    kind="strategy",
    alias="diloco",
    target="dstrat_diloco.strategy:DiLoCoStrategy",
    summary="groups of ranks that train apart by another strategy, and average every 100 steps",
    approximation="groups of ranks train apart between their averages, so that its losses are not those of one device",
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
    return [_DILOCO]
