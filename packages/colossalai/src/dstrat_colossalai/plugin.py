"""Records of the components of this distribution."""

from __future__ import annotations

import dataclasses

from dstrat.plugins.component import Component, hookimpl

_GEMINI = Component(
    kind="strategy",
    alias="colossalai",
    target="dstrat_colossalai.strategy:ColossalAIStrategy",
    summary="Colossal-AI's Gemini: parameters, gradients and optimizer state in chunks that are sharded and offloaded",
    requires=("colossalai>=0.5,<0.6", "peft>=0.7.1", "galore_torch>=1.0"),
    pip_options=("--no-deps",),
    requires_note="Colossal-AI asks for torch<=2.5.1: the README of dstrat-colossalai lists what else it imports",
    options={"start_method": "popen"},
    device_types=("cuda",),
    uses_torch_distributed=True,
    drives_several_devices=False,
    precisions=("16-mixed", "bf16-mixed"),
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)
_LOW_LEVEL_ZERO = dataclasses.replace(
    _GEMINI.variant(
        "colossalai_low_level_zero",
        "Colossal-AI's ZeRO 1 and 2: sharded optimizer state and gradients, on CUDA devices",
    ),
    target="dstrat_colossalai.strategy:ColossalAILowLevelZeroStrategy",
    precisions=("32-true", "16-mixed", "bf16-mixed"),
)
_TORCH_DDP = dataclasses.replace(
    _GEMINI.variant(
        "colossalai_torch_ddp",
        "Colossal-AI's booster with torch's DistributedDataParallel",
    ),
    target="dstrat_colossalai.strategy:ColossalAITorchDDPStrategy",
    device_types=("cpu", "cuda"),
    precisions=(),
)
_TORCH_FSDP = dataclasses.replace(
    _GEMINI.variant(
        "colossalai_torch_fsdp",
        "Colossal-AI's booster with torch's FullyShardedDataParallel, on CUDA devices",
    ),
    target="dstrat_colossalai.strategy:ColossalAITorchFSDPStrategy",
    precisions=("32-true", "bf16-mixed"),
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the aliases of the family."""
    return [_GEMINI, _LOW_LEVEL_ZERO, _TORCH_DDP, _TORCH_FSDP]
