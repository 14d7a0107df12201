"""Records of the components of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, Tombstone, hookimpl

_FSDP = Component(
    kind="strategy",
    alias="fsdp",
    target="dstrat_fsdp.strategy:FSDPStrategy",
    summary="parameters, gradients and optimizer state sharded over all devices",
    options={"start_method": "popen"},
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)

_MODEL_PARALLEL = Component(
    kind="strategy",
    alias="model_parallel",
    target="dstrat_fsdp.model_parallel:ModelParallelStrategy",
    summary="layers split over the devices of a group, which share a batch, and sharded over the groups",
    options={"start_method": "popen"},
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)

_SHARDED = Component(
    kind="strategy",
    alias="ddp_sharded",
    target="dstrat_fsdp.fairscale.sharded:DDPShardedStrategy",
    summary="FairScale: whole parameters, sharded gradients and optimizer state",
    requires=("fairscale==0.4.13",),
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
    target="dstrat_fsdp.fairscale.fully_sharded:DDPFullyShardedStrategy",
    summary="FairScale's fully sharded training, on CUDA devices; fsdp runs on any",
    requires=("fairscale==0.4.13",),
    options={"start_method": "popen"},
    device_types=("cuda",),
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)


@hookimpl
def dstrat_components() -> list[Component | Tombstone]:
    """Return the aliases of the family."""
    return [
        _FSDP,
        _FSDP.variant("fsdp_native", "fsdp under the name of its seeds"),
        _FSDP.variant("fsdp_cpu_offload", "fsdp, its shards and the optimizer on the CPU", cpu_offload=True),
        _FSDP.variant(
            "fsdp_native_full_shard_offload", "fsdp_cpu_offload under the name of its seeds", cpu_offload=True
        ),
        _FSDP.variant(
            "fsdp_hybrid_shard", "fsdp inside each machine, replicas between them", sharding_strategy="HYBRID_SHARD"
        ),
        _MODEL_PARALLEL,
        *(variant for component in (_SHARDED, _SHARDED_SPAWN) for variant in (component, _without_search(component))),
        _FULLY_SHARDED,
    ]


def _without_search(component: Component) -> Component:
    return component.variant(
        f"{component.alias}_find_unused_parameters_false",
        f"{component.alias}, its default spelled out",
        find_unused_parameters=False,
    )
