"""The command, run in a fresh interpreter."""

from __future__ import annotations

import subprocess
import sys

import pytest

MAIN = "from dstrat.cli.main import main; main()"


@pytest.fixture
def dstrat(site):
    """Run the command where only the made-up distributions are installed; torch is not there."""
    return lambda *arguments, **environ: site.run("-c", MAIN, *arguments, **environ)


@pytest.fixture
def installed_dstrat():
    """Run the command with all that is installed."""
    return lambda *arguments: subprocess.run(
        [sys.executable, "-c", MAIN, *arguments], capture_output=True, text=True, timeout=120, check=False
    )
