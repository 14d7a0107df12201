"""Tests on simulated GPUs, in processes of their own: a type of device that torch has learned stays for good.

``python3 noxfile.py -s simulated_gpu`` runs them.
"""

import os

import pytest

from dstrat.testing import simulated_gpu

HAS_DEVICES = simulated_gpu.DEVICES in os.environ
# The kit's standard tests may not be skipped.
collect_ignore = [] if HAS_DEVICES else ["test_conformance.py"]


def pytest_runtest_setup(item):
    """Skip what cannot run here, before fixtures of its module are made, and say why."""
    if not HAS_DEVICES:
        pytest.skip(f"there are no simulated GPUs without {simulated_gpu.DEVICES}: python3 noxfile.py -s simulated_gpu")


@pytest.fixture(scope="session", autouse=True)
def device_type(warm_fork_server):
    """Add the type of device to torch; the fork server has it without."""
    if HAS_DEVICES:
        simulated_gpu.load()
