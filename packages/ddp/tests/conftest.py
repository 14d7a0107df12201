"""The fixture that runs a function of a test file in several ranks."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds nothing, and ranks import these too

from ddp_ranks import RankRunner


@pytest.fixture(scope="session")
def runner():
    """Processes of the warm fork server."""
    return RankRunner()


@pytest.fixture
def ranks(runner, request):
    """Run a function of this test's file on ranks 0, 1, ...; return what each returned."""

    def run(function, world_size=2, **arguments):
        return runner.run(request.path, function.__name__, world_size, **arguments)

    return run
