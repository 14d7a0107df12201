"""What hivemind leaves to the garbage collector is found in the test that it belongs to, and is no error."""

import gc
import sys

import pytest


def pytest_collection_modifyitems(items):
    """Ignore event loops and sockets that hivemind does not close."""
    for item in items:
        if item.path.parent.parent.name == "hivemind":
            item.add_marker(pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"))


@pytest.fixture(autouse=True)
def collect_garbage():
    """Collect them before another package's test, among the objects of this test: all of torch's take a second."""
    gc.freeze()
    yield
    if "hivemind" in sys.modules:
        gc.collect()
    gc.unfreeze()
