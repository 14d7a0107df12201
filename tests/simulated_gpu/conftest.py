"""Tests on simulated GPUs, in processes of their own: a type of device that torch has learned stays for good.

``python3 noxfile.py -s simulated_gpu`` runs them.
"""

import os

import pytest

from dstrat.testing import simulated_gpu

HAS_DEVICES = simulated_gpu.DEVICES in os.environ
# The kit's standard tests may not be skipped.
collect_ignore = [] if HAS_DEVICES else ["test_conformance.py"]


# Parts of the kit that launch and end processes, or look at records: they show nothing of a device that the session
# ``tests`` does not, and take more than half of the time.  The accelerator's suite starts processes with devices.
WITHOUT_DEVICES = {"Records", "Sessions", "Failures"}


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
def pytest_collection_modifyitems(items):
    """Leave to ``-m variant`` what has nothing of a device."""
    for item in items:
        part = getattr(item.function, "__qualname__", "").partition(".")[0]
        if item.path.name == "test_conformance.py" and part in WITHOUT_DEVICES:
            item.add_marker(pytest.mark.variant)


def pytest_runtest_setup(item):
    """Skip what cannot run here, before fixtures of its module are made, and say why."""
    if not HAS_DEVICES:
        pytest.skip(f"there are no simulated GPUs without {simulated_gpu.DEVICES}: python3 noxfile.py -s simulated_gpu")


@pytest.fixture(scope="session", autouse=True)
def device_type(warm_fork_server):
    """Add the type of device to torch; the fork server has it without."""
    if HAS_DEVICES:
        simulated_gpu.load()
