"""Skipping tests where there is no torch_xla, or no TPU."""

import importlib.metadata
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds nothing


@pytest.fixture(scope="session", autouse=True)
def started_runtime():
    """Start XLA's runtime before the first backward pass on the CPU, after which gradients of XLA devices fail."""
    if not _why_torch_xla_is_not_there():
        from dstrat_xla import runtime

        runtime.torch_xla().device()


def _why_torch_xla_is_not_there() -> str:
    try:
        importlib.metadata.version("torch_xla")
    except importlib.metadata.PackageNotFoundError:
        return "torch_xla is not installed here: python3 noxfile.py -s xla"
    return ""


def pytest_collection_modifyitems(items):
    """Skip tests before their fixtures of a module train."""
    if reason := _why_torch_xla_is_not_there():
        for item in items:
            is_here = Path(__file__).parent in item.path.parents
            if is_here and not item.get_closest_marker("without_torch_xla"):
                item.add_marker(pytest.mark.skip(reason=reason))


# The kit's standard tests may not be skipped.
collect_ignore = ["test_conformance.py"] if _why_torch_xla_is_not_there() else []


@pytest.fixture(autouse=True)
def xla_hardware(request):
    """Skip what needs a TPU where there is none."""
    if request.node.get_closest_marker("tpu"):
        from dstrat_xla.runtime import num_tpus

        if not num_tpus():
            pytest.skip("this machine has no TPU")
