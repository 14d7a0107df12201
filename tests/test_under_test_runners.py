"""A training on two processes inside of a test: the test is not run once more in each of them."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

TESTS = """
import os
import unittest

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule

STARTED = "started.txt"


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Notes(Callback):
    def on_train_start(self, trainer, module):
        with open(STARTED, "a") as file:
            file.write(f"{trainer.strategy.global_rank} of {trainer.strategy.world_size}\\n")


def fit(strategy):
    module = Net()
    before = module.layer.weight.detach().clone()
    trainer = Trainer(strategy=strategy, accelerator="cpu", devices=2, max_steps=2, logger=False, callbacks=[Notes()],
                      enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(16, 4)), 4))
    assert not torch.equal(module.layer.weight, before)
    return {choice.subject: f"{choice.value}: {choice.reason}" for choice in trainer.plan.choices}["processes"]


class TestNet(unittest.TestCase):
    def test_strategies(self):
        for strategy in STRATEGIES:
            expected = f"2 by fork: one per device; {RUNNER} runs this, and is no script to run again by 'popen'"
            self.assertEqual(fit(strategy), expected)

    def test_other_tests_follow(self):
        with open("finished.txt", "a") as file:
            file.write("once")
"""

RUNNERS = {
    "pytest": (["{bin}/pytest", "-q", "-p", "no:cacheprovider"], ("fsdp",), "pytest"),
    "python -m pytest": (["{python}", "-m", "pytest", "-q", "-p", "no:cacheprovider"], ("ddp",), "pytest"),
    "pytest -n 1": (["{bin}/pytest", "-q", "-n", "1", "-p", "no:cacheprovider"], ("auto",), "pytest"),
    "python -m unittest": (["{python}", "-m", "unittest", "test_net"], ("ddp",), "unittest"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "strategies", "runner"),
    [
        pytest.param(*case, id=name, marks=[] if name == "pytest" else [pytest.mark.variant])
        for name, case in RUNNERS.items()
    ],
)
def test_ranks_are_forked_where_running_the_script_again_would_run_all_tests(
    command: list[str], strategies: tuple[str, ...], runner: str, tmp_path: Path
) -> None:
    if "-n" in command and find_spec("xdist") is None:
        pytest.skip("needs pytest-xdist")
    (tmp_path / "test_net.py").write_text(f"STRATEGIES, RUNNER = {strategies!r}, {runner!r}\n{TESTS}")
    places = {"bin": str(Path(sys.executable).parent), "python": sys.executable}
    outer = ("PYTEST_CURRENT_TEST", "PYTEST_XDIST")  # of the pytest that this test runs in
    environ = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    done = subprocess.run(
        [word.format(**places) for word in command],
        env=environ,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2 passed" in done.stdout or "Ran 2 tests" in done.stderr
    started = sorted((tmp_path / "started.txt").read_text().splitlines())
    assert started == sorted(["0 of 2", "1 of 2"] * len(strategies))
    assert (tmp_path / "finished.txt").read_text() == "once"


@pytest.mark.slow
def test_a_script_that_a_test_starts_is_a_script(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import pytest\n"
        "from dstrat.resolve import Request, make_plan\n"
        "print(make_plan(Request(strategy='ddp', accelerator='cpu', devices=2)).start_method)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=400, check=True)
    assert done.stdout.strip() == "popen"
