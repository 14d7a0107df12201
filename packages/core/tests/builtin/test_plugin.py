"""The records of the core's own components."""

import subprocess
import sys
from importlib import import_module

import pytest

from dstrat.builtin.plugin import dstrat_components
from dstrat.interfaces.accelerator import Accelerator
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.interfaces.cluster import ClusterEnvironment
from dstrat.interfaces.precision import Precision
from dstrat.interfaces.strategy import Strategy

INTERFACES = {
    "strategy": Strategy,
    "accelerator": Accelerator,
    "precision": Precision,
    "checkpoint_io": CheckpointIO,
    "cluster_environment": ClusterEnvironment,
}
COMPONENTS = dstrat_components()

SRUN = {"SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
SBATCH = {"SLURM_NTASKS": "2", "SLURM_PROCID": "0"}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
JSRUN = {"JSM_NAMESPACE_RANK": "0"}
BY_HAND = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
POD = {"KUBERNETES_PORT": "", "RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
TORCHRUN = {**BY_HAND, "TORCHELASTIC_RUN_ID": "none"}
DSTRAT = {**BY_HAND, "DSTRAT_JOB": "x"}


def of_kind(kind):
    return [component for component in COMPONENTS if component.kind == kind]


def load(component):
    module, name = component.target.split(":")
    return getattr(import_module(module), name)


def detected(environ):
    """The environment that is chosen automatically: of those with evidence the one with the highest rank."""
    environments = sorted(of_kind("cluster_environment"), key=lambda component: -component.auto)
    return next((component.alias for component in environments if load(component).evidence(environ)), None)


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda component: component.alias)
def test_every_record_leads_to_a_class_that_can_be_constructed_with_its_options(component):
    cls = load(component)
    assert issubclass(cls, INTERFACES[component.kind])
    live = cls({}) if component.kind == "cluster_environment" else cls(**component.options)
    if component.kind == "precision":
        assert live.flag == component.alias


def test_no_name_is_used_twice_in_one_kind():
    for kind in INTERFACES:
        names = [name for component in of_kind(kind) for name in (component.alias, *component.synonyms)]
        assert len(names) == len(set(names))


def test_automatic_ranks_leave_no_choice_open():
    for kind in INTERFACES:
        ranks = [component.auto for component in of_kind(kind) if component.auto is not None]
        assert ranks
        assert len(ranks) == len(set(ranks))


def test_short_names_of_precisions_mean_what_people_expect():
    synonyms = {name: component.alias for component in of_kind("precision") for name in component.synonyms}
    assert synonyms == {"16": "16-mixed", "32": "32-true", "64": "64-true", "bf16": "bf16-mixed"}


def test_gpu_stands_for_cuda_before_others():
    members = [component for component in of_kind("accelerator") if "gpu" in component.groups]
    assert [member.alias for member in sorted(members, key=lambda member: -member.auto)] == ["cuda", "xpu", "mps"]


@pytest.mark.parametrize(
    ("environ", "alias"),
    [
        ({}, None),
        (SRUN, "slurm"),
        (SBATCH, "slurm"),
        (MPIRUN, "mpi"),
        (JSRUN, "lsf"),
        (BY_HAND, "env"),
        (POD, "kubeflow"),
        (TORCHRUN, "torchelastic"),
        (DSTRAT, "local"),
        ({**SRUN, **TORCHRUN}, "torchelastic"),
        ({**POD, **TORCHRUN}, "torchelastic"),
        ({**SRUN, **MPIRUN}, "mpi"),
        ({**SBATCH, **MPIRUN}, "mpi"),
        ({**JSRUN, **MPIRUN}, "lsf"),
        ({**SBATCH, **BY_HAND}, "env"),
        ({**POD, **BY_HAND}, "env"),
        ({**SRUN, **TORCHRUN, **DSTRAT}, "local"),
    ],
)
def test_the_environment_nearest_to_the_process_is_chosen(environ, alias):
    assert detected(environ) == alias


def test_the_records_are_read_without_torch():
    code = (
        "import sys; from dstrat.builtin.plugin import dstrat_components; dstrat_components(); "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)


def test_reading_the_environment_needs_no_torch():
    code = (
        "import sys\n"
        "from dstrat.builtin.clusters import kubeflow, lsf, mpi, plain, slurm, torchelastic\n"
        "plain.PlainEnvironment({'RANK': '0'}).global_rank\n"
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=400)
