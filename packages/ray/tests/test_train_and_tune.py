"""Workers of Ray Train and trials of Ray Tune: every strategy unchanged, reports, and going on after a failure."""

import json
import os
import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

pytest.importorskip("ray.tune", reason="needs ray[train,tune]: nox -s neighbours", exc_type=ImportError)

import ray.train
import ray.tune
from packages.ray.tests.ray_cluster import OPTIONS, Line, loader, two_machines, weights_of_one_device
from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
from ray.train.examples.pytorch.torch_linear_example import LinearDataset, train_func
from ray.train.torch import TorchTrainer
from ray.tune.integration.ray_train import CHECKPOINT_PATH_KEY, TuneReportCallback

from dstrat import Trainer, TrainModule
from dstrat.errors import ClusterError, MisuseError, RequestError
from dstrat.plugins.catalog import get_catalog
from dstrat.resolve.cluster import choose_cluster
from dstrat_ray import RayReportCallback, RayTrainEnvironment, latest_checkpoint

pytestmark = [
    pytest.mark.neighbours,
    pytest.mark.xdist_group("ray"),
    pytest.mark.filterwarnings("default"),  # Ray's own, in this process
]


@pytest.fixture(scope="module")
def cluster():
    with two_machines() as machines:
        yield machines


def fit_lines(config):
    """Train on all workers, and write the weights and what the Trainer says of this rank."""
    module = Line()
    callback = RayReportCallback(dirpath=config["folder"])
    trainer = Trainer(strategy=config["strategy"], callbacks=[callback], default_root_dir=config["folder"], **OPTIONS)
    trainer.fit(module, loader(trainer.world_size))
    row = next(row for row in trainer.plan.choices if row.subject == "cluster")
    text = json.dumps([row.value, trainer.global_rank, trainer.local_rank, trainer.world_size])
    Path(config["folder"], f"rank-{trainer.global_rank}").write_text(text)


def run_workers(function, config, tmp_path, **run):
    return TorchTrainer(
        function,
        train_loop_config={"folder": str(tmp_path), **config},
        # Ray Train counts machines by their addresses, and two raylets have one.
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="STRICT_SPREAD"),
        run_config=RunConfig(storage_path=str(tmp_path / "storage"), name="lines", **run),
    ).fit()


@pytest.mark.clusters
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_strategies_train_in_workers_of_ray_train(cluster, strategy, tmp_path):
    result = run_workers(fit_lines, {"strategy": strategy}, tmp_path)
    ranks = [json.loads((tmp_path / f"rank-{rank}").read_text()) for rank in (0, 1)]
    assert ranks == [["ray_train", 0, 0, 2], ["ray_train", 1, 1, 2]]
    assert (result.metrics["epoch"], result.metrics["step"]) == (1, 8)
    assert 0 < result.metrics["loss"] < 1
    resumed = Line()  # the checkpoint that Ray has continues anywhere
    Trainer(strategy="single_device", devices=1, **{**OPTIONS, "max_epochs": 3}).fit(
        resumed, loader(1), ckpt_path=Path(result.checkpoint.path, "checkpoint")
    )
    assert torch.allclose(resumed.layer.weight, weights_of_one_device(max_epochs=3), rtol=1e-5)


def fit_and_fail_once(config):
    class Failing(Line):
        def on_train_epoch_start(self):
            marker = Path(config["folder"], "failed")
            if self.trainer.current_epoch == 2 and not marker.exists():
                self.trainer.strategy.barrier("both ranks have looked")
                if self.trainer.global_rank == 1:
                    marker.touch()
                    os.kill(os.getpid(), 9)

    checkpoint = latest_checkpoint()
    callback = RayReportCallback(dirpath=config["folder"])
    options = {**OPTIONS, "max_epochs": 4}
    trainer = Trainer(strategy="ddp", callbacks=[callback], default_root_dir=config["folder"], **options)
    module = Failing()
    trainer.fit(module, loader(2), ckpt_path=checkpoint)
    if trainer.is_global_zero:
        Path(config["folder"], "begun").write_text(str(checkpoint))
        torch.save(module.layer.weight.detach(), Path(config["folder"], "weights.pt"))


@pytest.mark.clusters
@pytest.mark.slow
def test_workers_that_ray_restarts_continue_from_the_latest_report(cluster, tmp_path):
    result = run_workers(
        fit_and_fail_once,
        {},
        tmp_path,
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=1),
    )
    assert (tmp_path / "failed").exists()
    assert re.search(r"storage/lines/checkpoint_.*/checkpoint$", (tmp_path / "begun").read_text())
    assert (result.metrics["epoch"], result.metrics["step"]) == (3, 16)
    weights = torch.load(tmp_path / "weights.pt")
    assert torch.allclose(weights, weights_of_one_device(max_epochs=4), rtol=1e-5)
    assert not list(tmp_path.glob("dstrat-ray-*"))  # what Ray has copied


class Linear(TrainModule):
    """The model of Ray's example."""

    def __init__(self, lr):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.lr = torch.nn.Linear(1, 1), lr

    def training_step(self, batch, batch_idx):
        x, y = batch
        return torch.nn.functional.mse_loss(self.layer(x), y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        self.log("loss", torch.nn.functional.mse_loss(self.layer(x), y), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def fit_example(config):
    """Ray's own example of PyTorch, torch_linear_example.train_func, by a Trainer."""
    train = DataLoader(LinearDataset(2, 5, size=1000), batch_size=4)
    validation = DataLoader(LinearDataset(2, 5, size=400), batch_size=4)
    callbacks = [RayReportCallback(save_checkpoints=config.get("save", False))]
    options = {**OPTIONS, "max_epochs": 3, "callbacks": callbacks}
    trainer = Trainer(strategy=config.get("strategy", "ddp"), **options)
    trainer.fit(Linear(config["lr"]), train, validation)


def run_example(config):
    torch.manual_seed(0)
    train_func(config)


@pytest.mark.clusters
@pytest.mark.slow
def test_pytorch_example_of_ray_gets_the_same_weights_with_a_trainer(cluster, tmp_path):
    theirs, ours = tmp_path / "theirs", tmp_path / "ours"
    example = run_workers(run_example, {"lr": 1e-2, "batch_size": 4, "epochs": 3}, theirs)
    result = run_workers(fit_example, {"lr": 1e-2, "save": True}, ours)
    assert (result.metrics["epoch"], result.metrics["step"]) == (2, 375)
    module = Linear(0.0)
    checkpoint = Path(result.checkpoint.path, "checkpoint")
    Trainer(strategy="single_device", devices=1, **OPTIONS).validate(
        module, DataLoader(LinearDataset(2, 5, size=400), batch_size=4), ckpt_path=checkpoint, verbose=False
    )
    weights = torch.load(Path(example.checkpoint.path, "model.pt"))
    for name in ("weight", "bias"):
        (expected,) = (tensor for key, tensor in weights.items() if key.endswith(name))
        assert torch.allclose(getattr(module.layer, name), expected, rtol=1e-5)


def test_trials_of_ray_tune_report_values_and_checkpoints(cluster, tmp_path):
    space = {"lr": ray.tune.grid_search([1e-2, 1e-5]), "strategy": "single_device", "save": True}
    tuner = ray.tune.Tuner(
        fit_example,
        param_space=space,
        run_config=ray.tune.RunConfig(storage_path=str(tmp_path), name="trials", verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    assert sorted(len(result.metrics_dataframe) for result in results) == [3, 3]
    best = results.get_best_result("loss", "min")
    assert best.config["lr"] == 1e-2
    module = Linear(0.0)
    weights = Trainer(strategy="single_device", devices=1, **OPTIONS)
    measured = weights.validate(
        module,
        DataLoader(LinearDataset(2, 5, size=400), batch_size=4),
        ckpt_path=Path(best.checkpoint.path, "checkpoint"),
        verbose=False,
    )
    assert measured[0]["loss"] == pytest.approx(best.metrics["loss"], rel=1e-5)


def fit_example_on_two_workers(config):
    """Train a trial on two ranks, which are workers of Ray Train."""
    TorchTrainer(
        fit_example,
        train_loop_config={"lr": config["lr"], "strategy": "ddp", "save": True},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=config["folder"],
            name=f"lr-{config['lr']}",
            callbacks=[TuneReportCallback()],
        ),
    ).fit()


@pytest.mark.clusters
@pytest.mark.slow
def test_trials_of_ray_tune_train_with_ddp_on_two_workers(cluster, tmp_path):
    space = {"lr": ray.tune.grid_search([1e-2, 1e-5]), "folder": str(tmp_path / "workers")}
    tuner = ray.tune.Tuner(
        fit_example_on_two_workers,
        param_space=space,
        tune_config=ray.tune.TuneConfig(max_concurrent_trials=1),  # each takes two CPUs and one for itself
        run_config=ray.tune.RunConfig(storage_path=str(tmp_path), name="trials", verbose=0),
    )
    results = tuner.fit()
    assert not results.errors
    assert sorted(len(result.metrics_dataframe) for result in results) == [3, 3]
    best = results.get_best_result("loss", "min")
    assert (best.config["lr"], best.metrics["epoch"], best.metrics["step"]) == (1e-2, 2, 375)
    measured = Trainer(strategy="single_device", devices=1, **OPTIONS).validate(
        Linear(0.0),
        DataLoader(LinearDataset(2, 5, size=400), batch_size=4),
        ckpt_path=Path(best.metrics[CHECKPOINT_PATH_KEY], "checkpoint"),
        verbose=False,
    )
    assert measured[0]["loss"] == pytest.approx(best.metrics["loss"], rel=1e-5)


# What cannot run


@pytest.mark.clusters
@pytest.mark.slow
def test_trials_of_ray_tune_that_cannot_start_ranks_themselves_say_what_can(cluster, tmp_path):
    def fit_on_two_devices(config):
        options = {**OPTIONS, "default_root_dir": config["folder"], "devices": 2}
        Trainer(strategy=config["strategy"], **options).fit(Line(), loader(2))
        ray.tune.report({"done": 1})

    tuner = ray.tune.Tuner(
        fit_on_two_devices,
        param_space={"strategy": ray.tune.grid_search(["ddp", "ddp_fork"]), "folder": str(tmp_path)},
        run_config=ray.tune.RunConfig(storage_path=str(tmp_path), name="trials", verbose=0),
    )
    refused, done = tuner.fit()
    assert re.search(
        r"strategy 'ddp' .* starts its processes from a script, and here is none \(.* a worker of another program\): "
        "run a script, ask for devices=1, or choose a strategy that works here",
        str(refused.error),
    )
    assert done.metrics["done"] == 1


def test_callback_outside_of_ray_is_refused(tmp_path, recwarn):
    trainer = Trainer(
        strategy="single_device", devices=1, callbacks=[RayReportCallback()], default_root_dir=tmp_path, **OPTIONS
    )
    with pytest.raises(MisuseError, match="this process is neither a worker of Ray Train nor a trial of Ray Tune: fit"):
        trainer.fit(Line(), loader(1))
    with pytest.raises(MisuseError, match="neither a worker of Ray Train nor a trial"):
        latest_checkpoint()
    assert not [warning for warning in recwarn if "get_trial_id" in str(warning.message)]


@pytest.mark.parametrize("number", [0, -1, 1.5, True])
def test_callback_refuses_numbers_of_epochs_that_make_no_sense(number):
    with pytest.raises(RequestError, match="every_n_epochs needs a number of epochs from 1"):
        RayReportCallback(every_n_epochs=number)


WORKER = {
    "RAY_JOB_ID": "01000000",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "NODE_RANK": "1",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29500",
}


def test_ranks_of_torchrun_in_an_actor_are_those_of_torchrun():
    in_actor = {**WORKER, "TORCHELASTIC_RUN_ID": "1", "GROUP_RANK": "1"}
    for environ, name in ((WORKER, "ray_train"), (in_actor, "torchelastic")):
        assert choose_cluster(None, get_catalog(), environ).name == name


def test_placement_that_does_not_fit_says_how_to_start():
    RayTrainEnvironment(WORKER).validate(num_devices=2, num_nodes=2)
    message = (
        r"LOCAL_WORLD_SIZE is 2, and devices=4 with num_nodes=1 needs 4: start with ScalingConfig\(num_workers=4, "
    )
    with pytest.raises(ClusterError, match=message):
        RayTrainEnvironment(WORKER).validate(num_devices=4, num_nodes=1)
