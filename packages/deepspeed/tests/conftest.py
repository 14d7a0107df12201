"""The fixture that runs a function of a test file in several ranks, and what is said of tests of compiled parts."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.ranks import in_ranks

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode adds nothing, and ranks import these too

# Without DeepSpeed only the plugin can be tested; nox -s complete has it.
collect_ignore_glob = [] if find_spec("deepspeed") else ["test_[!p]*.py", "test_parity.py"]


@pytest.fixture(scope="session")
def ranks():
    """Run a function on ranks 0, 1, ...; return what each returned."""
    return in_ranks


def pytest_terminal_summary(terminalreporter):
    """Say which tests ran with what DeepSpeed compiles; those that did not are skipped with the reason."""
    ended = (report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, []))
    names = [report.nodeid for report in ended if "builds" in report.keywords and report.when == "call"]
    if names:
        terminalreporter.write_line(f"{len(names)} tests ran with parts of DeepSpeed that were compiled before:")
        for name in sorted(names):
            terminalreporter.write_line(f"  {name}")
