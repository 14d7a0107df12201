"""Records of the components of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_LEGACY = "FairScale is no longer developed; fsdp or deepspeed_stage_2 do the same"

_SHARDED = Component(
    kind="strategy",
    alias="ddp_sharded",
    target="dstrat_fairscale.sharded:DDPShardedStrategy",
    summary="FairScale: whole parameters, sharded gradients and optimizer state",
    requires=("fairscale==0.4.13",),
    legacy=_LEGACY,
    options={"start_method": "popen"},
    device_types=("cpu", "cuda"),
    uses_torch_distributed=True,
    drives_several_devices=False,
    precisions=("32-true", "bf16-true", "bf16-mixed", "16-mixed"),
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)
_SHARDED_SPAWN = _SHARDED.variant(
    "ddp_sharded_spawn", "ddp_sharded, its processes started with spawn", start_method="spawn"
)

_FULLY_SHARDED = Component(
    kind="strategy",
    alias="ddp_fully_sharded",
    target="dstrat_fairscale.fully_sharded:DDPFullyShardedStrategy",
    summary="FairScale's fully sharded training, on CUDA devices; fsdp runs on any",
    requires=("fairscale==0.4.13",),
    legacy=_LEGACY,
    options={"start_method": "popen"},
    device_types=("cuda",),
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the aliases of the family."""
    sharded = [component for alias in (_SHARDED, _SHARDED_SPAWN) for component in (alias, _without_search(alias))]
    return [*sharded, _FULLY_SHARDED]


def _without_search(component: Component) -> Component:
    """Return the alias that older programs use, whose option is the default."""
    return component.variant(
        f"{component.alias}_find_unused_parameters_false",
        f"{component.alias}, its default spelled out",
        find_unused_parameters=False,
    )
