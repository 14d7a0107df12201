"""The launcher for processes that exist already."""

import pytest
from tests.warm_program import WarmProgram

from dstrat.launch.external import ExternalLauncher

SCRIPT = """
import os
from dstrat.launch.external import ExternalLauncher

def work(number):
    if "RANK" in os.environ:
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


def test_torchrun_shows_the_traceback_of_the_rank(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "torchrun.py").write_text("from torch.distributed.run import main\nmain()\n")
    torchrun = WarmProgram(tmp_path / "torchrun.py", "--nproc-per-node=1", "--standalone", str(tmp_path / "script.py"))
    _, errors = torchrun.communicate()
    assert torchrun.returncode == 1
    assert "rank      : 0" in errors
    assert "ValueError: boom" in errors.partition("Root Cause")[2]
