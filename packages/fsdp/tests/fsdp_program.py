"""A script that trains through the Trainer and writes what came of it, as a user's script would.

Arguments: a JSON object with ``out`` (a folder) and ``runs`` (a list of arguments for the Trainer, each with a name).
"""

import json
import sys
from pathlib import Path

import torch
from tests.hand_loop import BlockNet
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


def trainer_with(out, losses, strategy, devices, options=None, **arguments):
    if options is not None:
        strategy = ModelParallelStrategy(**options)
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        logger=False,
        callbacks=[losses],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=out,
        **arguments,
    )


def evaluate(trainer, model):
    """Test and predict; all that a test logs."""
    logged = trainer.test(model, loader(EVALUATED, BATCH))[0]
    predictions = trainer.predict(Model(splits=True) if model.splits else model, loader(EVALUATED, BATCH))
    return logged, torch.cat(predictions).sum(1).tolist()


def run(out, name, devices, splits=False, shares=None, **arguments):
    """Fit and validate, then test and predict with another Trainer; write what came of it."""
    torch.manual_seed(0)
    model, losses = Model(splits), Losses()
    batch_size = BATCH // (shares or devices)
    trainer = trainer_with(out, losses, devices=devices, **arguments)
    trainer.fit(model, loader(BATCH * STEPS, batch_size), loader(EVALUATED, BATCH))
    found = {"losses": losses.losses, "val_loss": float(trainer.callback_metrics["val_loss"])}
    if not splits:  # layers that are split cannot be taken over by another run
        found["trained"] = evaluate(trainer_with(out, losses, devices=devices, **arguments), model)
    found["fresh"] = evaluate(trainer_with(out, losses, devices=devices, **arguments), Model(splits))
    Path(f"{out}/{name}.{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    order = json.loads(sys.argv[1])
    for arguments in order["runs"]:
        run(order["out"], **arguments)
