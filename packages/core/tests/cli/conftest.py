"""The command, run in a process of its own."""

from __future__ import annotations

import subprocess

import pytest
from tests.warm_program import WarmProgram

MAIN = "from dstrat.cli.main import main; main()"


@pytest.fixture
def dstrat(site):
    """Run the command where only the made-up distributions are installed; torch is not there."""
    return lambda *arguments, **environ: site.run("-c", MAIN, *arguments, **environ)


@pytest.fixture
def installed_dstrat(tmp_path):
    """Run the command with all that is installed."""
    script = tmp_path / "main.py"
    script.write_text(MAIN)

    def run(*arguments):
        program = WarmProgram(script, *arguments)
        out, err = program.communicate(timeout=400)
        return subprocess.CompletedProcess(arguments, program.returncode, out, err)

    return run
