"""Skipping tests where Horovod is not installed, with the reason."""

import pytest
from packages.horovod.tests.build_library import why_missing

# The kit's standard tests may not be skipped.
collect_ignore = ["test_conformance.py"] if why_missing() else []


def pytest_runtest_setup(item):
    """Skip what cannot run here, before fixtures of its module are made, and say why."""
    if not item.get_closest_marker("without_horovod") and (reason := why_missing()):
        pytest.skip(reason)
