"""Records of the components of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_VENDOR = "habana-torch-plugin"
# It is in the vendor's images; on an index, a package of that name would be a stranger's.
_FROM_VENDOR = ("--no-index", "--find-links=FOLDER_OF_GAUDIS_SOFTWARE")
_ACCELERATORS = ("hpu",)
_PRECISIONS = ("32-true", "bf16-true", "bf16-mixed")

_HPU = Component(
    kind="accelerator",
    alias="hpu",
    target="dstrat_hpu.accelerator:HPUAccelerator",
    summary="Intel Gaudi, one device in each process",
    requires=(_VENDOR,),
    pip_options=_FROM_VENDOR,
    auto=55,
    device_type="hpu",
    process_group_backend="hccl",
    supports_torch_distributed=True,
    devices_share_process=False,
    strategies={"hpu_deepspeed": "deepspeed"},
)

# The strategies are those of the core and of other families: what Gaudi needs, its accelerator does and declares.

_SINGLE = Component(
    kind="strategy",
    alias="hpu_single",
    target="dstrat.builtin.single_device:SingleDeviceStrategy",
    summary="one process on one Gaudi",
    requires=(_VENDOR,),
    pip_options=_FROM_VENDOR,
    auto=110,  # before single_device
    accelerators=_ACCELERATORS,
    precisions=(*_PRECISIONS, "fp8"),
    uses_torch_distributed=False,
    drives_several_devices=False,
    starts_processes=False,
    notebook_safe=True,
    multi_node=False,
)

_PARALLEL = Component(
    kind="strategy",
    alias="hpu_parallel",
    target="dstrat_ddp.strategy:DDPStrategy",
    summary="ddp over hccl: one process per Gaudi, gradients averaged during the backward pass",
    synonyms=("hpu_ddp",),
    requires=("dstrat-ddp>=0.1,<0.2",),  # the accelerator requires the vendor's software, from elsewhere
    options={"start_method": "popen"},
    auto=105,
    accelerators=_ACCELERATORS,
    precisions=(*_PRECISIONS, "fp8"),
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)

_FSDP = Component(
    kind="strategy",
    alias="hpu_fsdp",
    target="dstrat_fsdp.strategy:FSDPStrategy",
    summary="fsdp over hccl: parameters, gradients and optimizer state sharded over all Gaudis",
    requires=("dstrat-fsdp>=0.1,<0.2",),  # the accelerator requires the vendor's software, from elsewhere
    options={"start_method": "popen"},
    accelerators=_ACCELERATORS,
    precisions=_PRECISIONS,
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)

_FP8 = Component(
    kind="precision",
    alias="fp8",
    target="dstrat_hpu.precision:HPUPrecisionPlugin",
    summary="Gaudi's transformer engine: products in 8 bits, everything else as with bf16-mixed",
    requires=(_VENDOR,),
    pip_options=_FROM_VENDOR,
    options={"precision": "fp8"},
)

_FILES = Component(
    kind="checkpoint_io",
    alias="hpu",
    target="dstrat_hpu.checkpoint:HPUCheckpointIO",
    summary="one file with tensors of the CPU; the portable format is the default here too",
    requires=(_VENDOR,),
    pip_options=_FROM_VENDOR,
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the components of the family."""
    return [_HPU, _SINGLE, _PARALLEL, _FSDP, _FP8, _FILES]
