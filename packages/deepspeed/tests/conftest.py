"""The fixture that runs a function of a test file in several ranks."""

import sys
from pathlib import Path

import pytest
from tests.ranks import in_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds nothing, and ranks import these too


@pytest.fixture(scope="session")
def ranks():
    """Run a function on ranks 0, 1, ...; return what each returned."""
    return in_ranks
