"""Records of the strategies of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_TORCHFT = Component(
    kind="strategy",
    alias="torchft_ddp",
    target="dstrat_torchft.strategy:TorchFTStrategy",
    summary="torchft: replica groups that train together, of which any may die and join again",
    requires=("torchft>=0.2,<0.3",),
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
)
_DILOCO = Component(
    kind="strategy",
    alias="torchft_diloco",
    target="dstrat_torchft.diloco:TorchFTDiLoCoStrategy",
    summary="torchft: replica groups that train apart and rarely average, of which any may die and join again",
    approximation="groups train apart between their averages, so that its losses are not those of one device",
    requires=("torchft>=0.2,<0.3",),
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the aliases of the family."""
    return [_TORCHFT, _DILOCO]
