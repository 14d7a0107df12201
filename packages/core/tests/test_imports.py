"""What is loaded when."""

import subprocess
import sys

import pytest
from tests.warm_program import WITHOUT_DSTRAT, WarmProgram

PROGRAM = """
import gc
import dstrat
dstrat.Trainer(accelerator="cpu", devices=1, logger=False)
assert gc.isenabled()
print(*(name for name in sys.modules if name.startswith("dstrat.")))
"""


def test_a_trainer_is_made_without_what_only_runs_and_checkpoints_need(tmp_path):
    script = tmp_path / "program.py"
    script.write_text(WITHOUT_DSTRAT + PROGRAM)
    loaded = set(WarmProgram(script).run().split())
    assert "dstrat.training.trainer" in loaded
    assert not loaded & {
        "dstrat.checkpoint.portable.load",
        "dstrat.checkpoint.portable.save",
        "dstrat.data.loaders",
        "dstrat.training.loops.evaluation_loop",
        "dstrat.training.loops.fit_loop",
        "dstrat.training.execution",
    }


def test_a_collector_that_was_off_before_an_import_is_off_afterwards():
    program = "import gc; gc.disable(); from dstrat import Component; assert not gc.isenabled()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=400)


@pytest.mark.slow
def test_modules_of_names_are_there_after_importing_the_package_alone():
    homes = {
        "callbacks": "ModelCheckpoint",
        "loggers": "CSVLogger",
        "profilers": "SimpleProfiler",
        "strategies": "Strategy",
    }
    names = [f"pl.{home}.{name}" for home, name in homes.items()]
    program = f"import dstrat as pl, sys; assert 'torch' not in sys.modules; print({', '.join(names)}, pl.accelerators)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=400)
