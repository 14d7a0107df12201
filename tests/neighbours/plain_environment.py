"""Plugin of pytest: each test begins without the variables of a rank, which other libraries leave behind.

Lightning leaves its MASTER_PORT, and DeepSpeed in one process RANK and WORLD_SIZE.
"""

import os

import pytest

_NAMES = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup():
    for name in _NAMES:
        os.environ.pop(name, None)
