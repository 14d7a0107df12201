"""Records of the components of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_HIVEMIND = Component(
    kind="strategy",
    alias="hivemind",
    target="dstrat_hivemind.strategy:HivemindStrategy",
    summary="hivemind: peers on the network that accumulate a batch together, and come and go",
    synonyms=("collaborative",),
    requires=("hivemind>=1.1.12,<1.2",),
    uses_torch_distributed=False,
    drives_several_devices=False,
    precisions=("32-true", "bf16-true", "bf16-mixed"),
    starts_processes=False,
    notebook_safe=True,
    multi_node=False,  # each peer is a job by itself
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the aliases of the family."""
    return [_HIVEMIND]
