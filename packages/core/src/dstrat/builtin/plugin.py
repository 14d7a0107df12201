"""Records of the core's components."""

from __future__ import annotations

import dataclasses
import os

from dstrat.plugins.component import Component, hookimpl

_SINGLE_DEVICE = Component(
    kind="strategy",
    alias="single_device",
    target="dstrat.builtin.single_device:SingleDeviceStrategy",
    summary="one process on one device, without communication",
    auto=100,  # the best choice for one device; with more it is never selected
    uses_torch_distributed=False,
    drives_several_devices=False,
    starts_processes=False,
    notebook_safe=True,
    multi_node=False,
)

_CPU = Component(
    kind="accelerator",
    alias="cpu",
    target="dstrat.builtin.accelerators.cpu:CPUAccelerator",
    summary="the processor; devices are processes",
    auto=10,  # lower than that of any GPU, which is preferred where there is one
    device_type="cpu",
    process_group_backend="gloo",
    supports_torch_distributed=True,
    devices_share_process=True,
)
_CUDA = Component(
    kind="accelerator",
    alias="cuda",
    target="dstrat.builtin.accelerators.cuda:CUDAAccelerator",
    summary="NVIDIA GPUs, and AMD GPUs with a ROCm build of torch",
    auto=50,
    groups=("gpu",),
    device_type="cuda",
    process_group_backend="nccl",
    supports_torch_distributed=True,
    devices_share_process=True,
)
_XPU = Component(
    kind="accelerator",
    alias="xpu",
    target="dstrat.builtin.accelerators.torch_accelerator:TorchAccelerator",
    summary="Intel GPUs",
    options={"device_type": "xpu"},
    auto=45,
    groups=("gpu",),
    device_type="xpu",
    process_group_backend="xccl",
    supports_torch_distributed=True,
    devices_share_process=True,
)
_MPS = Component(
    kind="accelerator",
    alias="mps",
    target="dstrat.builtin.accelerators.mps:MPSAccelerator",
    summary="the GPU of Apple silicon",
    auto=40,
    groups=("gpu",),
    device_type="mps",
    process_group_backend="none",
    supports_torch_distributed=False,
    devices_share_process=True,
)
# For tests on machines without a GPU: it is offered only where it is asked for.
_SIMULATED_GPU = Component(
    kind="accelerator",
    alias="simulated_gpu",
    target="dstrat.testing.simulated_gpu.accelerator:SimulatedGPUAccelerator",
    summary="GPUs that are simulated on the CPU, for tests",
    device_type="simgpu",
    process_group_backend="simulated_ccl",
    supports_torch_distributed=True,
    devices_share_process=True,
)

_TRUE = Component(
    kind="precision",
    alias="32-true",
    target="dstrat.builtin.precision.true:TruePrecision",
    summary="everything in float32",
    synonyms=("32",),
    options={"precision": "32-true"},
    auto=10,
)
_MIXED = Component(
    kind="precision",
    alias="bf16-mixed",
    target="dstrat.builtin.precision.mixed:MixedPrecision",
    summary="parameters in float32, products in bfloat16",
    synonyms=("bf16",),
    options={"precision": "bf16-mixed"},
)

_TORCH_CHECKPOINT = Component(
    kind="checkpoint_io",
    alias="torch",
    target="dstrat.checkpoint.torch_file:TorchCheckpointIO",
    summary="one file, written by torch.save",
    auto=10,
)
_PORTABLE_CHECKPOINT = Component(
    kind="checkpoint_io",
    alias="portable",
    target="dstrat.checkpoint.portable.checkpoint_io:PortableCheckpointIO",
    summary="a directory that any strategy on any number of ranks can load, written by all ranks",
    auto=20,  # preferred to one file: any strategy on any number of ranks can load it
)


def _cluster(
    module: str, class_name: str, summary: str, *variables: str, alias: str | None = None, auto: int
) -> Component:
    return Component(
        kind="cluster_environment",
        alias=alias or module,
        target=f"dstrat.builtin.clusters.{module}:{class_name}",
        summary=summary,
        auto=auto,
        evidence_variables=variables,
    )


# The environment nearest to the process wins: dstrat's own launcher runs inside all others, torchrun and variables
# set by hand inside a scheduler's task, mpirun inside a task of SLURM.  jsrun sets Open MPI's variables as well.
_CLUSTERS = [
    _cluster("local", "LocalEnvironment", "processes that dstrat starts on this machine", "DSTRAT_JOB", auto=80),
    _cluster(
        "torchelastic", "TorchElasticEnvironment", "processes that torchrun started", "TORCHELASTIC_RUN_ID", auto=70
    ),
    _cluster("kubeflow", "KubeflowEnvironment", "pods of a Kubeflow PyTorchJob", "KUBERNETES_PORT", auto=60),
    _cluster("plain", "PlainEnvironment", "RANK, WORLD_SIZE and the like, set by anyone", "RANK", alias="env", auto=50),
    _cluster("lsf", "LSFEnvironment", "tasks that LSF's jsrun started", "JSM_NAMESPACE_RANK", auto=40),
    _cluster("mpi", "MPIEnvironment", "processes that mpirun started", "OMPI_COMM_WORLD_RANK", "PMI_RANK", auto=30),
    _cluster("slurm", "SLURMEnvironment", "tasks that SLURM's srun started", "SLURM_STEP_ID", "SLURM_NTASKS", auto=20),
]


@hookimpl
def dstrat_components() -> list[Component]:
    """Return the core's components."""
    return [
        _SINGLE_DEVICE,
        _CPU,
        _CUDA,
        _XPU,
        _MPS,
        *([_SIMULATED_GPU] if "DSTRAT_SIMULATED_GPUS" in os.environ else []),
        _TRUE,
        dataclasses.replace(_TRUE.variant("64-true", "everything in float64", precision="64-true"), synonyms=("64",)),
        _TRUE.variant("16-true", "everything in float16", precision="16-true"),
        _TRUE.variant("bf16-true", "everything in bfloat16", precision="bf16-true"),
        _MIXED,
        dataclasses.replace(
            _MIXED.variant("16-mixed", "parameters in float32, products in float16, scaled loss", precision="16-mixed"),
            synonyms=("16",),
        ),
        _TORCH_CHECKPOINT,
        _PORTABLE_CHECKPOINT,
        *_CLUSTERS,
    ]
