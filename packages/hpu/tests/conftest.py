"""Skipping tests where there is no simulator of Gaudi, and a simulated machine for each process of pytest."""

import atexit
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds nothing, and ranks import these too

HAS_SIMULATOR = find_spec("habana_frameworks") is not None
# The kit's standard tests may not be skipped.
collect_ignore = ["simulator", *([] if HAS_SIMULATOR else ["test_conformance.py"])]

if HAS_SIMULATOR:
    # Processes of pytest that run side by side must not compete for one machine's devices.
    os.environ["HABANA_SIMULATOR_MACHINE"] = tempfile.mkdtemp(prefix="simulated-gaudi-")
    atexit.register(shutil.rmtree, os.environ["HABANA_SIMULATOR_MACHINE"], ignore_errors=True)
    # Graphs are counted here and in ranks; tests of the default, eager mode start processes of their own.
    os.environ["PT_HPU_LAZY_MODE"] = "1"


@pytest.fixture(scope="session", autouse=True)
def loaded_before_autograd(warm_fork_server):
    """Load the simulator before the first backward pass on the CPU, as torch loads the vendor's plugin by itself."""
    if HAS_SIMULATOR:
        # Ranks have the machine of the fork server, which runs already: this process keeps its device until it ends.
        os.environ["HABANA_SIMULATOR_MACHINE"] += "/of-pytest"
        import habana_frameworks.torch  # noqa: F401 - later, gradients of the device fail


def pytest_runtest_setup(item):
    """Skip what cannot run here, before fixtures of its module are made, and say why."""
    if not HAS_SIMULATOR and not item.get_closest_marker("without_habana"):
        pytest.skip("the simulator of Gaudi is not installed here: python3 noxfile.py -s hpu")
