"""A script that trains through the Trainer. Arguments: a folder for what is found, devices, strategies."""

import json
import sys
from pathlib import Path

import torch
from deepspeed_loop import Net
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, Trainer, TrainModule

BATCH, STEPS, EVALUATED = 8, 8, 28  # on two ranks, one has a batch more than the other


class Model(TrainModule):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return {"loss": self.net.training_step(batch, batch_idx)}

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.net.training_step(batch, batch_idx))

    def test_step(self, batch, batch_idx):
        self.log("test_loss", self.net.training_step(batch, batch_idx))
        self.log("samples", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch, batch_idx):
        return self.net.layers(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Losses(Callback):
    def __init__(self):
        self.losses, self.lr = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.losses.append(float(trainer.strategy.reduce(outputs["loss"].detach())))
        self.lr.append(trainer.optimizers[0].param_groups[0]["lr"])


def loader(samples, batch_size):
    inputs = torch.randn(samples, 6, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs[:, :3] - inputs[:, 3:]), batch_size=batch_size)


def train(out, strategy, devices):
    """Fit, validate, test and predict; write what this rank has found."""
    model, losses = Model(), Losses()
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        max_epochs=1,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        logger=False,
        callbacks=[losses],
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=out,
    )
    trainer.fit(model, loader(BATCH * STEPS, BATCH // devices), loader(EVALUATED, BATCH))
    logged = {"val_loss": float(trainer.callback_metrics["val_loss"])}
    logged |= trainer.test(model, loader(EVALUATED, BATCH))[0]
    predictions = torch.cat(trainer.predict(model, loader(EVALUATED, BATCH))).sum(1).tolist()
    found = {"losses": losses.losses, "lr": losses.lr, "logged": logged, "predictions": predictions}
    Path(f"{out}/{strategy}.{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, number, *names = sys.argv[1:]
    for name in names:
        train(folder, name, int(number))
