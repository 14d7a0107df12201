"""What is loaded when."""

import subprocess
import sys

PROGRAM = """
import gc, sys
import dstrat
assert "torch" not in sys.modules
dstrat.Trainer(accelerator="cpu", devices=1, logger=False)
assert gc.isenabled()
print(*(name for name in sys.modules if name.startswith("dstrat.")))
"""


def test_a_trainer_is_made_without_what_only_runs_and_checkpoints_need():
    printed = subprocess.run([sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, timeout=120)
    loaded = set(printed.stdout.split())
    assert "dstrat.training.trainer" in loaded
    assert not loaded & {
        "dstrat.builtin.checkpoint.portable.loading",
        "dstrat.builtin.checkpoint.portable.saving",
        "dstrat.data.loaders",
        "dstrat.training.loops.evaluation_loop",
        "dstrat.training.loops.fit_loop",
        "dstrat.training.run",
    }


def test_a_collector_that_was_off_before_an_import_is_off_afterwards():
    program = "import gc; gc.disable(); from dstrat import Component; assert not gc.isenabled()"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
