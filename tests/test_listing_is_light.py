"""Importing dstrat, every plugin, and listing what there is leave torch out and are quick."""

import os
import resource
import subprocess
import sys
from importlib.metadata import entry_points

import pytest

LISTINGS = ["strategies", "accelerators", "plugins", "show ddp", "show ddp(bucket_cap_mb=1)"]
REPORT_TORCH = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))"


def in_a_fresh_interpreter(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("DSTRAT_", "PYTHON"))}
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result


def run_command(listing: str) -> subprocess.CompletedProcess[str]:
    code = f"{REPORT_TORCH}; from dstrat.cli.main import main; sys.argv[0] = 'dstrat'; sys.exit(main())"
    return in_a_fresh_interpreter(code, *listing.split())


def processor_seconds(code: str, *arguments: str) -> float:
    """Return the processor time of a fresh interpreter: unlike wall time, other programs hardly change it."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    in_a_fresh_interpreter(code, *arguments)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_import_dstrat_leaves_torch_out() -> None:
    assert in_a_fresh_interpreter(f"{REPORT_TORCH}; import dstrat").stderr == "False\n"


@pytest.mark.parametrize("module", sorted(point.module for point in entry_points(group="dstrat.v1")))
def test_every_installed_plugin_leaves_torch_out(module: str) -> None:
    assert in_a_fresh_interpreter(f"{REPORT_TORCH}; import {module}").stderr == "False\n"


@pytest.mark.parametrize("listing", [*LISTINGS, *(f"{listing} --json" for listing in LISTINGS)])
def test_every_listing_command_leaves_torch_out(listing: str) -> None:
    result = run_command(listing)
    assert result.stderr == "False\n"
    assert "ddp" in result.stdout or "cpu" in result.stdout


def test_import_dstrat_costs_little_more_than_an_empty_interpreter() -> None:
    empty = min(processor_seconds("pass") for _ in range(5))
    dstrat = min(processor_seconds("import dstrat") for _ in range(5))
    assert dstrat - empty < 0.2  # the goal is 0.03; torch takes 2


def test_listing_the_strategies_is_quick() -> None:
    code = "import sys; from dstrat.cli.main import main; sys.exit(main())"
    assert min(processor_seconds(code, "strategies") for _ in range(3)) < 1  # the goal is 0.3; torch takes 2
