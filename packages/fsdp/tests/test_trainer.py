"""The aliases through the Trainer: training and evaluation, also where ranks have different numbers of batches."""

import pytest
import torch
from tests.hand_loop import BlockNet
from tests.ranks import each, in_ranks
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule
from dstrat_fsdp import ModelParallelStrategy

BATCH = 8
STEPS = 10
EVALUATED = 3 * BATCH + 4  # on two ranks, one has a batch more than the other


class Model(TrainModule):
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

    def training_step(self, batch, batch_idx):
        return self.net.training_step(batch, batch_idx)

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net.validation_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        loss = self.net.validation_step(batch, batch_idx)
        self.log("test_loss", loss)
        self.log("samples", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return self.net.layers(batch[0]).detach()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Losses(Callback):
    """Keeps the global loss of each batch."""

    def __init__(self):
        self.losses = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.losses.append(float(trainer.strategy.reduce(loss.detach())))


def loader(samples, batch_size):
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(samples, 6, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs[:, :3] - inputs[:, 3:]), batch_size=batch_size)


def trainer_with(cluster, folder, losses, strategy):
    return Trainer(
        strategy=ModelParallelStrategy(tensor_parallel_size=2) if strategy == "model_parallel" else strategy,
        accelerator="cpu",
        devices=1 if cluster is None else cluster.world_size,
        plugins=None if cluster is None else [cluster],
        max_epochs=1,
        logger=False,
        callbacks=[losses],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    )


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
