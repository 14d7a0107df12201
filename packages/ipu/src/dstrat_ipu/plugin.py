"""Records of the components of this distribution."""

from __future__ import annotations

from dstrat.plugins.component import Component, hookimpl

_REQUIRES = ("poptorch>=3.0",)  # each fits one version of torch
_FROM_SDK = ("--no-index", "--find-links=FOLDER_OF_GRAPHCORES_SDK")  # on an index it would be a stranger's
_NEEDS_A_BUILD = "a build for torch 2.9 or later: Graphcore's releases load with torch 2.0.1 or older alone"

_IPU = Component(
    kind="accelerator",
    alias="ipu",
    target="dstrat_ipu.accelerator:IPUAccelerator",
    summary="Graphcore's IPUs, through poptorch",
    requires=_REQUIRES,
    pip_options=_FROM_SDK,
    requires_note=_NEEDS_A_BUILD,
    device_type="ipu",
    process_group_backend="none",
    supports_torch_distributed=False,
    devices_share_process=True,
    auto=58,
)

_STRATEGY = Component(
    kind="strategy",
    alias="ipu_strategy",
    target="dstrat_ipu.strategy:IPUStrategy",
    summary="one process for all IPUs, whole training steps compiled by poptorch",
    requires=_REQUIRES,
    pip_options=_FROM_SDK,
    requires_note=_NEEDS_A_BUILD,
    auto=110,  # before single_device, which cannot run anything on an IPU
    accelerators=("ipu",),
    precisions=("32-true", "16-true"),
    uses_torch_distributed=False,
    drives_several_devices=True,
    starts_processes=False,
    notebook_safe=True,
    multi_node=False,
)


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the components of the family."""
    return [_IPU, _STRATEGY]
