"""What this distribution offers to dstrat."""

from __future__ import annotations

from dstrat import Component, hookimpl


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the one strategy that there is."""
    return [
        Component(
            kind="strategy",
            alias="acme_diloco",
            target="acme_diloco.strategy:DiLoCoStrategy",
            summary="each process trains for itself, and a momentum step joins them every so many steps",
            uses_torch_distributed=True,
            drives_several_devices=False,
            starts_processes=True,
            notebook_safe=False,
            multi_node=True,
        )
    ]
