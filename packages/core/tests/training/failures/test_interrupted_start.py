"""Ctrl-C in the start-up of a run, most of which is imports."""

import os
import signal
import subprocess
import sys
from functools import cache

import pytest

SCRIPT = """
import sys, torch
from torch.utils.data import DataLoader
from dstrat import Trainer, TrainModule

class Net(TrainModule):
    def configure_optimizers(self):
        import slow_library

    def training_step(self, batch, batch_idx):
        raise AssertionError

if __name__ == "__main__":
    try:
        trainer = Trainer(accelerator="cpu", logger=False, enable_checkpointing=False, plugins=sys.argv[1:])
        trainer.fit(Net(), DataLoader(torch.ones(4, 8)))
    finally:
        print("torch._inductor" in sys.modules, flush=True)
"""
INTERRUPTED = f"import os\n\nos.kill(os.getpid(), {int(signal.SIGINT)})\nfor _ in range(10**6): pass\n"
PLUGIN = """
from dstrat.plugins.component import Component, hookimpl

@hookimpl
def dstrat_components():
    return [Component(kind="precision", alias="slow", target="slow_library:Slow", summary="slow")]
"""


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """Run the script with a library that interrupts the process while it is imported; return its output and errors."""
    tmp_path = tmp_path_factory.mktemp("interrupted")
    library = tmp_path / "site-packages"
    (library / "slow_plugin-1.0.dist-info").mkdir(parents=True)
    (library / "slow_plugin-1.0.dist-info" / "METADATA").write_text("Name: slow-plugin\nVersion: 1.0\n")
    (library / "slow_plugin-1.0.dist-info" / "entry_points.txt").write_text("[dstrat.v1]\nslow = slow_plugin\n")
    (library / "slow_plugin.py").write_text(PLUGIN)
    (library / "slow_library.py").write_text("import slow_part\n")
    (library / "slow_part.py").write_text(INTERRUPTED)
    (tmp_path / "train.py").write_text(SCRIPT)

    @cache
    def run(*arguments):
        done = subprocess.run(
            [sys.executable, "train.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(library)},
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )
        return done.stdout, done.stderr[done.stderr.index("Traceback") :]

    return run


def test_traceback_of_an_interrupt_ends_in_the_program(interrupted):
    _, errors = interrupted()
    assert errors.count("Traceback") == 1
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert "in configure_optimizers\n    import slow_library" in errors
    assert "slow_part.py" not in errors
    assert "importlib" not in errors


def test_interrupt_while_a_component_is_imported_shows_the_call_of_the_program(interrupted):
    _, errors = interrupted("slow")
    assert errors.splitlines()[-1] == "KeyboardInterrupt"
    assert "trainer = Trainer(" in errors
    assert "slow_part.py" not in errors


def test_interrupted_run_imports_nothing_while_it_ends(interrupted):
    """An import that the interrupt has broken off fails when it is repeated, and would hide the interrupt."""
    output, _ = interrupted()
    assert output == "False\n"
