"""A launcher that a plugin offers: its processes run the job of a Trainer, and a failure comes back."""

from __future__ import annotations

import re
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dstrat import GradientSyncStrategy, Launcher, Trainer, TrainModule, dump_call, make_rank_tasks, result_of_ranks
from dstrat.errors import ConflictError, MisuseError, RankFailedError
from dstrat.launch.task import remove_job_folder


def call(task):
    return task()


class PoolLauncher(Launcher):
    """Starts ranks in a pool of processes."""

    runs_here = False

    def launch(self, function, *args, **kwargs):
        tasks = make_rank_tasks(self, dump_call(partial(function, *args, **kwargs)))
        with ProcessPoolExecutor(len(tasks), mp_context=get_context("forkserver")) as pool:
            outcomes = list(pool.map(call, tasks))
        remove_job_folder(tasks[0])
        return result_of_ranks(outcomes, len(tasks))


class Averaging(GradientSyncStrategy):
    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


class Line(TrainModule):
    def __init__(self, fails=False):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
        self.fails = fails

    def training_step(self, batch, batch_idx):
        if self.fails and self.trainer.global_rank == 1:
            raise ValueError("no sample")
        loss = self.layer(batch[0]).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def make_trainer(tmp_path, **kwargs):
    options = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    options |= {"accelerator": "cpu", "devices": 2, "strategy": Averaging(), "max_epochs": 2, "logger": False}
    return Trainer(**{**options, "default_root_dir": tmp_path, "plugins": PoolLauncher(), **kwargs})


def loader():
    x = torch.randn(32, 2, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x), batch_size=4)


def test_launcher_of_a_plugin_runs_the_job(tmp_path):
    torch.manual_seed(0)
    trainer, module = make_trainer(tmp_path), Line()
    assert re.search(
        r"launcher +PoolLauncher +asked for\nprocesses +2 +one per device, by PoolLauncher", str(trainer.plan)
    )
    assert (trainer.plan.started_by, trainer.plan.world_size) == ("launcher", 2)
    trainer.fit(module, loader())
    torch.manual_seed(0)
    local = Line()
    make_trainer(tmp_path, plugins=None, strategy=Averaging(start_method="fork")).fit(local, loader())
    assert trainer.global_step == 8
    assert torch.equal(module.layer.weight, local.layer.weight)


def test_failing_rank_is_named_with_its_traceback(tmp_path):
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: ValueError: no sample") as failed:
        make_trainer(tmp_path).fit(Line(fails=True), loader())
    assert "training_step" in failed.value.rank_traceback
    assert failed.value.rank == 1


def test_strategy_without_processes_has_no_use_for_a_launcher(tmp_path):
    with pytest.raises(ConflictError, match=r"PoolLauncher starts processes, and strategy .* runs in one: choose"):
        make_trainer(tmp_path, strategy="single_device", devices=1)


def test_launcher_that_does_not_restart_refuses_max_restarts(tmp_path):
    with pytest.raises(ConflictError, match="max_restarts=2 needs a launcher that restarts processes, and Averaging"):
        make_trainer(tmp_path, max_restarts=2)


def test_launcher_that_cannot_be_constructed_says_so(tmp_path):
    class Wanting(PoolLauncher):
        def __init__(self, address):
            self.address = address

    with pytest.raises(MisuseError, match=r"launcher Wanting cannot be constructed \(.*address.*\): construct it your"):
        make_trainer(tmp_path, plugins=Wanting)
