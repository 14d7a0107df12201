"""The simulator of poptorch, which tests of this package import; other packages' tests do not see it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SIMULATOR = HERE / "simulator"
sys.path.insert(0, str(HERE))  # pytest's importlib mode adds nothing


@pytest.fixture(scope="session")
def simulated_ipus():
    """The number of IPUs that the simulator has."""
    return 8


@pytest.fixture(autouse=True)
def simulator(simulated_ipus, monkeypatch):
    """Put the simulator on the path, with its metadata and so many IPUs, also for processes that are started.

    Elsewhere it has no IPUs, even where it is loaded already, so that no accelerator is chosen for being simulated.
    """
    monkeypatch.syspath_prepend(str(SIMULATOR))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(SIMULATOR), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("POPTORCH_SIMULATED_IPUS", str(simulated_ipus))
    import poptorch

    yield poptorch
    poptorch.hardware._held.clear()  # of a test that failed
