"""Records of the components of this distribution."""

from __future__ import annotations

import dataclasses

from dstrat.plugins.component import Component, Tombstone, hookimpl

_DDP = Component(
    kind="strategy",
    alias="ddp",
    target="dstrat_ddp.strategy:DDPStrategy",
    summary="one process per device, gradients averaged during the backward pass",
    options={"start_method": "popen"},
    auto=100,
    uses_torch_distributed=True,
    drives_several_devices=False,
    starts_processes=True,
    notebook_safe=False,
    multi_node=True,
)

_SPAWN = _DDP.variant("ddp_spawn", "ddp, its processes started with spawn", start_method="spawn")
_FORK = dataclasses.replace(
    _DDP.variant("ddp_fork", "ddp, its processes forked", start_method="fork"), notebook_safe=True
)
_NOTEBOOK = dataclasses.replace(_FORK, alias="ddp_notebook", summary="ddp for notebooks, its processes forked", auto=50)

_REPLICATED = ("cpu", "cuda")  # torch's DataParallel copies between devices of CUDA, and calls the module on CPUs

_DP = Component(
    kind="strategy",
    alias="dp",
    target="dstrat_ddp.data_parallel:DataParallelStrategy",
    summary="one process, the module replicated on its devices, each batch split among them",
    device_types=_REPLICATED,
    uses_torch_distributed=False,
    drives_several_devices=True,
    starts_processes=False,
    notebook_safe=True,
    multi_node=False,
)

_DDP2 = Component(
    kind="strategy",
    alias="ddp2",
    target="dstrat_ddp.ddp2:DDP2Strategy",
    summary="one process per machine: dp inside it, ddp between machines",
    device_types=_REPLICATED,
    uses_torch_distributed=True,
    drives_several_devices=True,
    starts_processes=False,
    notebook_safe=True,
    multi_node=True,
)

_RETIRED = Tombstone(
    kind="strategy",
    alias="ddp_cpu",
    replacement="ddp",
    reason='accelerator="cpu" says where it runs',
)


@hookimpl
def dstrat_components() -> list[Component | Tombstone]:
    """Return the aliases of the family: each way of starting processes, with and without a search for the unused."""
    by_start = (_DDP, _SPAWN, _FORK, _NOTEBOOK)
    return [*by_start, *(variant for component in by_start for variant in _searches(component)), _DP, _DDP2, _RETIRED]


def _searches(component: Component) -> tuple[Component, Component]:
    alias = component.alias
    return (
        component.variant(
            f"{alias}_find_unused_parameters_true",
            f"{alias} for modules with parameters that a step may leave without a gradient",
            find_unused_parameters=True,
        ),
        component.variant(
            f"{alias}_find_unused_parameters_false",
            f"{alias} without a search for unused parameters, its default",
            find_unused_parameters=False,
        ),
    )
