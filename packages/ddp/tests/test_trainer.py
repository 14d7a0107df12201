"""The aliases through the Trainer, in scripts that are started as a user starts them."""

import json
import logging
from datetime import timedelta
from pathlib import Path

import pytest
from packages.ddp.tests import ddp_program
from tests.warm_program import WarmProgram

from dstrat import Callback
from dstrat.training import contexts
from dstrat_ddp import DDPStrategy

SCRIPT = f"""
import os, sys
sys.path.insert(0, {str(Path(ddp_program.__file__).parents[3])!r})
os.environ["PYTHONWARNINGS"] = "error"  # in the ranks, which are started anew
from packages.ddp.tests import ddp_program
ddp_program.torch.set_num_threads(1)
ddp_program.run(*sys.argv[1:], devices=2, strategy="ddp")
"""


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """Losses and weights after training on one device."""
    out = tmp_path_factory.mktemp("one_device")
    ddp_program.run(out, "single", devices=1, strategy="single_device")
    return json.loads((out / "single.json").read_text())["losses"], float((out / "single.weights.0").read_text())


def check(out, name, one_device):
    found = json.loads((out / f"{name}.json").read_text())
    losses, weights = one_device
    assert found["losses"] == pytest.approx(losses, rel=1e-6)
    assert (found["world_size"], found["model"]) == (2, "DistributedDataParallel")
    came_back = [float(path.read_text()) for path in out.glob(f"{name}.weights.*")]
    assert came_back == pytest.approx([weights] * len(came_back), rel=1e-5)
    assert came_back


def failure(out, name):
    [path] = out.glob(f"{name}.error.*")
    return path.read_text()


@pytest.mark.slow
def test_ddp_runs_the_script_again_and_gives_the_losses_of_one_device(tmp_path, one_device):
    (tmp_path / "train.py").write_text(SCRIPT)
    WarmProgram(tmp_path / "train.py", str(tmp_path), "ddp").run()
    check(tmp_path, "ddp", one_device)


@pytest.mark.on_cpu  # beside a GPU no process can be forked that has run a backward pass, as the first run does
def test_other_start_methods_bring_the_weights_back_also_after_failures(tmp_path, one_device):
    aliases = ["ddp_fork", "ddp_notebook_find_unused_parameters_false"]
    for run in (
        {"name": "fails", "strategy": "ddp_fork", "fails_on": 1},
        {"name": "unused", "strategy": "ddp_fork", "unused": True},
        {"name": "searched", "strategy": "ddp_fork_find_unused_parameters_true", "unused": True},
        {
            "name": "sent",
            "strategy": DDPStrategy(start_method="forkserver"),
        },  # as ddp_spawn does, which costs seconds
        *({"name": alias, "strategy": alias} for alias in aliases),
    ):
        ddp_program.run(tmp_path, devices=2, **run)
    assert failure(tmp_path, "fails").startswith("RankFailedError: rank 1 of 2 failed: ValueError: rank 1 had enough")
    assert "MisuseError: the loss does not depend on unused.weight, unused.bias" in failure(tmp_path, "unused")
    for name in ("searched", "sent", *aliases):
        check(tmp_path, name, one_device)


class SavesAlone(Callback):
    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            trainer.save_checkpoint(self.path)


def test_a_rank_that_saves_alone_says_that_it_waits_until_the_job_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(contexts, "SECONDS_BEFORE_WARNING", 0.5)
    monkeypatch.setattr(logging.getLogger("dstrat"), "handlers", [logging.FileHandler(tmp_path / "log", delay=True)])
    strategy = DDPStrategy(start_method="fork", timeout=timedelta(seconds=2))
    ddp_program.run(tmp_path, "alone", devices=2, strategy=strategy, callbacks=[SavesAlone(tmp_path / "saved")])
    assert failure(tmp_path, "alone").startswith("RankFailedError: rank ")
    assert "rank 0 has waited 0.5 s in save_checkpoint for the others" in (tmp_path / "log").read_text()
