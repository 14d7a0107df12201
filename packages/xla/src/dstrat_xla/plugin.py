"""Records of the components of this distribution."""

from __future__ import annotations

import dataclasses

from dstrat.plugins.component import Component, hookimpl

_REQUIRES = ("torch>=2.9,<2.10", "torch_xla>=2.9,<2.10")  # each torch_xla loads with the torch of its version only
_ACCELERATORS = ("xla", "tpu")
_PRECISIONS = ("32-true", "16-true", "bf16-true", "bf16-mixed")

_XLA = Component(
    kind="accelerator",
    alias="xla",
    target="dstrat_xla.accelerator:XLAAccelerator",
    summary="any device that XLA's runtime (PJRT) drives: TPU, Neuron, or the processor",
    requires=_REQUIRES,
    device_type="xla",
    process_group_backend="xla",
    supports_torch_distributed=False,
    devices_share_process=True,
    strategies={"single_device": "single_xla", "ddp_spawn": "xla"},
)
_TPU = dataclasses.replace(
    _XLA,
    alias="tpu",
    target="dstrat_xla.accelerator:TPUAccelerator",
    summary="Google's TPUs, through XLA",
    auto=60,
)

_SINGLE = Component(
    kind="strategy",
    alias="single_xla",
    target="dstrat_xla.strategy:SingleDeviceXLAStrategy",
    summary="one process on one XLA device, one graph for each optimizer step",
    synonyms=("single_tpu",),
    requires=_REQUIRES,
    auto=110,  # before single_device, which would untie weights that layers share
    accelerators=_ACCELERATORS,
    precisions=_PRECISIONS,
    uses_torch_distributed=False,
    drives_several_devices=False,
    starts_processes=False,
    notebook_safe=True,
    multi_node=False,
)

_PARALLEL = Component(
    kind="strategy",
    alias="xla",
    target="dstrat_xla.strategy:XLAStrategy",
    summary="one process for each XLA device, gradients averaged inside the graph",
    synonyms=("tpu_spawn",),
    requires=_REQUIRES,
    options={"start_method": "popen"},
    auto=90,
    accelerators=_ACCELERATORS,
    precisions=_PRECISIONS,
    uses_torch_distributed=False,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)
_DEBUG = dataclasses.replace(
    _PARALLEL.variant("xla_debug", "xla with torch_xla's report of compilations and slow operations", debug=True),
    synonyms=("tpu_spawn_debug",),
)

_SPMD = Component(
    kind="strategy",
    alias="xla_spmd",
    target="dstrat_xla.spmd:XLASPMDStrategy",
    summary="one process for all XLA devices, as a mesh over which the compiler divides the work",
    requires=_REQUIRES,
    accelerators=_ACCELERATORS,
    precisions=_PRECISIONS,
    uses_torch_distributed=False,
    drives_several_devices=True,
    starts_processes=False,
    notebook_safe=True,
    multi_node=False,
)

_FSDP = Component(
    kind="strategy",
    alias="xla_fsdp",
    target="dstrat_xla.fsdp:XLAFSDPStrategy",
    summary="torch_xla's FSDP: one process for each XLA device, parameters and optimizer state sharded",
    requires=_REQUIRES,
    options={"start_method": "popen"},
    accelerators=_ACCELERATORS,
    precisions=("32-true", "bf16-mixed"),  # torch_xla shards parameters in float32 only
    uses_torch_distributed=False,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)

_FILES = Component(
    kind="checkpoint_io",
    alias="xla",
    target="dstrat_xla.checkpoint:XLACheckpointIO",
    summary="one file, as torch_xla's save writes it; the portable format is the default here too",
    requires=_REQUIRES,
)
_POD = Component(
    kind="cluster_environment",
    alias="tpu_pod",
    target="dstrat_xla.cluster:XLAEnvironment",
    summary="hosts of a TPU pod, on each of which the script is started once",
    evidence_variables=("TPU_WORKER_HOSTNAMES",),
    auto=75,
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the components of the family."""
    return [_XLA, _TPU, _SINGLE, _PARALLEL, _DEBUG, _SPMD, _FSDP, _FILES, _POD]
