"""The fixture that runs a function of a test file in several ranks."""

import sys
import warnings
from pathlib import Path

import pytest

from dstrat.testing.jobs import run_job

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds nothing, and ranks import these too


@pytest.fixture(scope="session")
def ranks():
    """Run a function on ranks 0, 1, ...; return what each returned."""

    def run(function, world_size=2, **arguments):
        return run_job(in_rank, world_size, called=function, arguments=arguments)

    return run


def in_rank(place, called, arguments):
    """Run a function in a rank, where warnings are errors as in pytest."""
    warnings.simplefilter("error")
    # Raised by torch's own torch.distributed.optim when it is imported.
    warnings.filterwarnings("ignore", message=r".torch.jit.\w+. is deprecated", category=DeprecationWarning)
    return called(place.cluster, **arguments)
