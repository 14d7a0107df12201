"""Engines that the tests of this folder start, and the losses that each job must have."""

import pytest
from tests.clusters import checks, slurm


@pytest.fixture(scope="session")
def expected(tmp_path_factory):
    """The loss of each step of the job, in one process that no engine has started."""
    return checks.one_device_losses(tmp_path_factory.mktemp("one-device"))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """A SLURM cluster of two nodes."""
    if reason := slurm.missing_program():
        pytest.skip(reason)
    with slurm.Slurm(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster
