"""The aliases through the Trainer: training and evaluation, also where ranks have different numbers of batches."""

import pytest
import torch
from tests.hand_loop import BlockNet
from tests.ranks import each, in_ranks
from tests.trainer_runs import Evaluated, Losses, loader, quiet_trainer
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dstrat_fsdp import ModelParallelStrategy

BATCH = 8
STEPS = 10
EVALUATED = 3 * BATCH + 4  # on two ranks, one has a batch more than the other


class Model(Evaluated):
    def __init__(self, splits):
        super().__init__()
        self.splits = splits
        self.net = None

    def configure_model(self):
        if self.net is None:
            self.net = BlockNet()
        if self.splits:
            for block in self.net.blocks:
                mesh = self.device_mesh["tensor_parallel"]
                parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def trainer_with(cluster, folder, losses, strategy):
    asked = ModelParallelStrategy(tensor_parallel_size=2) if strategy == "model_parallel" else strategy
    return quiet_trainer(asked, cluster, callbacks=[losses], default_root_dir=folder)


def evaluate(trainer, model):
    """Test and predict; all that a test logs."""
    logged = trainer.test(model, loader(EVALUATED, BATCH))[0]
    predictions = trainer.predict(Model(splits=True) if model.splits else model, loader(EVALUATED, BATCH))
    return logged, torch.cat(predictions).sum(1).tolist()


def run(cluster, folder, strategy):
    """Fit and validate, then test and predict with another Trainer; return what came of it."""
    torch.manual_seed(0)
    splits = strategy == "model_parallel"
    model, losses = Model(splits), Losses()
    trainer = trainer_with(cluster, folder, losses, strategy)
    readers = 1 if cluster is None else cluster.world_size // (2 if splits else 1)
    trainer.fit(model, loader(BATCH * STEPS, BATCH // readers), loader(EVALUATED, BATCH))
    found = {"losses": losses.losses, "val_loss": float(trainer.callback_metrics["val_loss"])}
    if not splits:  # layers that are split cannot be taken over by another run
        found["trained"] = evaluate(trainer_with(cluster, folder, losses, strategy), model)
    found["fresh"] = evaluate(trainer_with(cluster, folder, losses, strategy), Model(splits))
    return found


@pytest.fixture(scope="module")
def one_device(tmp_path_factory):
    """What one device without any communication gives."""
    return run(None, tmp_path_factory.mktemp("one_device"), "single_device")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world_size", "strategies"), [(2, ("fsdp", "fsdp_cpu_offload", "fsdp_hybrid_shard")), (4, ("model_parallel",))]
)
def test_they_give_what_one_device_gives(tmp_path, one_device, world_size, strategies):
    cases = {name: {"folder": tmp_path, "strategy": name} for name in strategies}
    for found in in_ranks(each, world_size, function=run, cases=cases):
        for name in strategies:
            assert found[name]["losses"] == pytest.approx(one_device["losses"], rel=1e-6)
            assert found[name]["val_loss"] == pytest.approx(one_device["val_loss"], rel=1e-6)
            for key in {"trained", "fresh"} & found[name].keys():
                (logged, predictions), (expected_logged, expected_predictions) = found[name][key], one_device[key]
                assert logged == pytest.approx(expected_logged, rel=1e-6)
                assert logged["samples"] == EVALUATED
                assert predictions == pytest.approx(expected_predictions, rel=1e-5, abs=1e-6)
