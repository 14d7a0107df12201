"""The launcher for processes that exist already."""

import shutil
import sys
from pathlib import Path

import pytest

from dstrat.builtin.launchers.external import ExternalLauncher

SCRIPT = """
import os
from dstrat.builtin.launchers.external import ExternalLauncher

def work(number):
    if os.environ.get("RANK") == "1":
        raise ValueError("boom")
    return number + 1

print(ExternalLauncher().launch(work, 1))
"""


def test_function_is_called_here_and_its_result_returned():
    launcher = ExternalLauncher({})
    assert launcher.runs_here
    assert launcher.launch(divmod, 7, 2) == (3, 1)


def test_exception_passes_through():
    with pytest.raises(ZeroDivisionError):
        ExternalLauncher({}).launch(divmod, 1, 0)


@pytest.mark.skipif(shutil.which("torchrun", path=str(Path(sys.executable).parent)) is None, reason="no torchrun")
def test_torchrun_shows_the_traceback_of_the_rank(program):
    (program.folder / "script.py").write_text(SCRIPT)
    run = str(Path(sys.executable).with_name("torchrun"))
    outcome = program.run(run, "--nproc-per-node=2", "--standalone", "script.py", timeout=60)
    assert outcome.code == 1
    assert "rank      : 1" in outcome.errors
    assert "ValueError: boom" in outcome.errors.partition("Root Cause")[2]
