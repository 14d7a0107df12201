"""Command lines of training programs on several processes: each way of starting them has the same arguments."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.warm_program import WarmProgram

MODULES = """
import os, time
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from dstrat import DataModule, TrainModule

torch.set_num_threads(1)

class Net(TrainModule):
    def __init__(self, width: int = 2, lr: float = 0.1, seconds: float = 0.0):
        super().__init__()
        self.layer, self.lr, self.seconds = torch.nn.Linear(2, width), lr, seconds
    def training_step(self, batch, batch_idx):
        time.sleep(self.seconds)
        Path(f"step-{self.global_rank}").touch()
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)
    def on_train_end(self):
        Path(f"rank-{self.global_rank}").write_text(f"{self.trainer.world_size} {self.lr} {self.layer.weight.shape[0]}")

class Numbers(DataModule):
    def train_dataloader(self):
        return DataLoader(TensorDataset(torch.ones(16, 2)), batch_size=2)
"""
SCRIPT = """
from dstrat.cli import DstratCLI
from modules import Net, Numbers
if __name__ == "__main__":
    DstratCLI(Net, Numbers)
"""
TRAINER = """
trainer: {accelerator: cpu, devices: 2, max_epochs: 1, enable_progress_bar: false, enable_checkpointing: false}
"""
CONFIG = f"{TRAINER}model: {{class_path: modules.Net, init_args: {{lr: 0.25}}}}\ndata: modules.Numbers\n"
OF_CLASSES = f"{TRAINER}model: {{lr: 0.25}}\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "modules.py").write_text(MODULES)
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path


def start(folder: Path, *command: str) -> subprocess.Popen[str]:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=folder,
        env={**environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(program: subprocess.Popen[str], code: int = 0) -> str:
    """Wait for a program, and return what it wrote to stderr."""
    try:
        out, err = program.communicate(timeout=400)
    finally:
        if program.poll() is None:
            os.killpg(program.pid, signal.SIGKILL)
    assert program.returncode == code, out + err
    return err


def seen(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.glob("rank-*")}


def wait_for(path: Path) -> None:
    deadline = time.monotonic() + 300
    while not path.exists():
        assert time.monotonic() < deadline, f"{path.name} has not come"
        time.sleep(0.02)


def start_warm(folder: Path, *options: str) -> WarmProgram:
    """Start the command where most of what it imports is there; the other rank imports it itself."""
    (folder / "main.py").write_text("from dstrat.cli.main import main; main()")
    return WarmProgram(folder / "main.py", "fit", "--config=run.yaml", *options)


DSTRAT = ("-m", "dstrat", "fit", "--config=run.yaml")
INSTALLED = (str(Path(sys.executable).with_name("dstrat")), *DSTRAT[2:])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "strategy"),
    [
        (INSTALLED, "ddp"),
        pytest.param(DSTRAT, "ddp", marks=pytest.mark.variant),
        pytest.param(DSTRAT, "ddp_spawn", marks=pytest.mark.variant),
    ],
    ids=["installed-ddp", "module-ddp", "module-ddp_spawn"],
)
def test_the_command_trains_on_two_ranks_and_saves_one_configuration(
    folder: Path, command: tuple[str, ...], strategy: str
) -> None:
    finish(start(folder, *command, f"--trainer.strategy={strategy}", "--model.width=3"))
    assert seen(folder) == {"rank-0": "2 0.25 3", "rank-1": "2 0.25 3"}
    (saved,) = folder.rglob("config.yaml")
    assert saved.parent.name == "version_0"
    assert f"strategy: {strategy}" in saved.read_text()


@pytest.mark.variant
def test_ranks_use_the_configuration_that_the_program_has_read(folder: Path) -> None:
    """The file is gone when they begin, as is that of a shell's <(...), and another one is changed."""
    (folder / "more.yaml").write_text("model: {lr: 0.5}\n")
    (folder / "train.py").write_text(
        SCRIPT.replace("DstratCLI(", "cli = DstratCLI(").replace("Numbers)", "Numbers, run=False)")
        + "    import os, pathlib\n"
        + "    if 'DSTRAT_JOB' not in os.environ:\n"
        + "        os.remove('run.yaml'); pathlib.Path('more.yaml').write_text('model: {lr: 9.0}')\n"
        + "    cli.trainer.fit(cli.model, datamodule=cli.datamodule)\n"
    )
    (folder / "run.yaml").write_text(OF_CLASSES)
    finish(start(folder, "train.py", "-c", "run.yaml", "-c", "more.yaml", "--trainer.strategy=ddp"))
    assert seen(folder) == {"rank-0": "2 0.5 2", "rank-1": "2 0.5 2"}


@pytest.mark.slow
@pytest.mark.variant
def test_torchrun_runs_the_script_in_each_rank(folder: Path) -> None:
    (folder / "run.yaml").write_text(OF_CLASSES)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "train.py")
    finish(start(folder, *torchrun, "fit", "-c", "run.yaml", "--trainer.strategy=ddp"))
    assert seen(folder) == {"rank-0": "2 0.25 2", "rank-1": "2 0.25 2"}
    assert len(list(folder.rglob("config.yaml"))) == 1


@pytest.mark.slow
def test_ctrl_c_ends_all_ranks(folder: Path) -> None:
    options = ("--trainer.strategy=ddp", "--model.seconds=0.2", "--trainer.max_epochs=1000")
    program = start_warm(folder, *options)
    wait_for(folder / "step-1")
    os.killpg(program.pid, signal.SIGINT)  # as a terminal does
    _, err = program.communicate(timeout=400)
    assert program.returncode == 130, err
    assert "Aborted" not in err
    assert "Traceback" not in err


def test_a_rank_that_fails_is_shown_by_its_traceback(folder: Path) -> None:
    text = MODULES.replace("time.sleep(self.seconds)", "raise ValueError('odd batch')")
    (folder / "modules.py").write_text(text)
    program = start_warm(folder, "--trainer.strategy=ddp_fork")
    _, err = program.communicate(timeout=400)
    assert program.returncode == 1, err
    assert re.search(r"rank \d of 2 failed: ValueError: odd batch", err)
    assert "in training_step" in err


def test_without_jsonargparse_the_command_says_what_to_install(folder: Path) -> None:
    code = (
        "import sys; sys.modules['jsonargparse'] = None; sys.path_importer_cache.clear(); import importlib.util as u;"
    )
    code += "find = u.find_spec; u.find_spec = lambda name: None if name == 'jsonargparse' else find(name);"
    code += "sys.argv = ['dstrat', 'fit']; from dstrat.cli.main import main; main()"
    err = finish(start(folder, "-c", code), 2)
    assert err == 'dstrat: dstrat fit needs jsonargparse, which is not installed: pip install "dstrat[cli]"\n'
