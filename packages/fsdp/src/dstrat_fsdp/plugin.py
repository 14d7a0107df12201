"""Records of the components of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

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


@hookimpl
def dstrat_components() -> list[Component]:
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
    ]
