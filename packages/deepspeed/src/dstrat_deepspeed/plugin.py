"""Records of the components of this distribution."""

from __future__ import annotations

from typing import Any

from dstrat.plugins.component import Component, hookimpl

# Devices with a communication backend in DeepSpeed.  All except CPUs and CUDA need their vendors' software, and are not
# tested here.
_DEVICE_TYPES = ("cpu", "cuda", "hpu", "mlu", "npu", "sdaa", "supa", "xpu")

_DEEPSPEED = Component(
    kind="strategy",
    alias="deepspeed",
    target="dstrat_deepspeed.strategy:DeepSpeedStrategy",
    summary="DeepSpeed's ZeRO, by default stage 2: gradients and optimizer state sharded",
    requires=("deepspeed>=0.19.8,<0.20",),
    options={"start_method": "popen"},
    device_types=_DEVICE_TYPES,
    uses_torch_distributed=True,
    drives_several_devices=False,
    precisions=("32-true", "bf16-true", "bf16-mixed", "16-mixed"),
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)

_OPTIMIZER = {"offload_optimizer": True}
_PARAMETERS = {"offload_parameters": True, **_OPTIMIZER}
_NVME = {"remote_device": "nvme", "offload_params_device": "nvme", "offload_optimizer_device": "nvme", **_PARAMETERS}

_VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "deepspeed_stage_0": ("DeepSpeed without sharding", {"stage": 0}),
    "deepspeed_stage_1": ("optimizer state sharded", {"stage": 1}),
    "deepspeed_stage_1_offload": ("optimizer state sharded, on the CPU", {"stage": 1, **_OPTIMIZER}),
    "deepspeed_stage_2": ("gradients and optimizer state sharded", {"stage": 2}),
    "deepspeed_stage_2_offload": ("gradients and optimizer state sharded, on the CPU", {"stage": 2, **_OPTIMIZER}),
    "deepspeed_stage_3": ("parameters, gradients and optimizer state sharded", {"stage": 3}),
    "deepspeed_stage_3_offload": ("all of them sharded, on the CPU", {"stage": 3, **_PARAMETERS}),
    "deepspeed_stage_3_offload_nvme": ("all of them sharded, in files on NVMe", {"stage": 3, **_NVME}),
}


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the aliases of the family."""
    files = Component(
        kind="checkpoint_io",
        alias="deepspeed",
        target="dstrat_deepspeed.native_checkpoint:DeepSpeedCheckpointIO",
        summary="reads what DeepSpeed itself has saved",
    )
    variants = [_DEEPSPEED.variant(alias, text, **options) for alias, (text, options) in _VARIANTS.items()]
    return [_DEEPSPEED, *variants, files]
