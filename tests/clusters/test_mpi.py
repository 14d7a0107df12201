"""Jobs of Open MPI's mpirun on one host."""

import shutil
import subprocess

import pytest
from tests.clusters import checks
from tests.clusters.checks import JOB, PYTHON

pytestmark = [
    pytest.mark.clusters,
    pytest.mark.skipif(
        shutil.which("ompi_info") is None, reason="Open MPI is not installed: apt-get install openmpi-bin"
    ),
]


def mpirun(folder, *arguments, num_ranks=2):
    options = ("-n", str(num_ranks), "--allow-run-as-root", "--oversubscribe")
    command = ["mpirun", *options, PYTHON, str(JOB), str(folder), f"--devices={num_ranks}", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize(("strategy", "num_ranks"), [("ddp", 2), pytest.param("fsdp", 4, marks=pytest.mark.slow)])
def test_ranks_of_mpirun_train(tmp_path, expected, strategy, num_ranks):
    done = mpirun(tmp_path / "job", f"--strategy={strategy}", num_ranks=num_ranks)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained 12 steps\n"
    assert checks.ranks(tmp_path / "job") == [(rank, rank, 0) for rank in range(num_ranks)]
    checks.check_losses(tmp_path / "job", expected)
    checks.check_samples(tmp_path / "job")
    checks.check_no_survivors(tmp_path / "job")


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["raise", "kill"])
def test_failing_rank_ends_the_job_and_is_named(tmp_path, failure):
    done = mpirun(tmp_path / "job", f"--fail={failure}")
    assert done.returncode != 0
    if failure == "raise":
        assert "[rank1]: ValueError: bad sample" in done.stderr
    else:
        assert "process rank 1 with PID" in done.stderr + done.stdout  # of mpirun, with the node
    checks.check_no_survivors(tmp_path / "job")
