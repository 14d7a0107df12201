"""A script that trains through the Trainer. Arguments: a folder for what is found, devices, strategies."""

import json
import sys
from pathlib import Path

import torch
from deepspeed_loop import Net
from tests.trainer_runs import Evaluated, Losses, loader, quiet_trainer

from dstrat import Callback

BATCH, STEPS, EVALUATED = 8, 8, 28  # on two ranks, one has a batch more than the other


class Model(Evaluated):
    def __init__(self):
        super().__init__()
        self.net = Net()

    def training_step(self, batch, batch_idx):
        return {"loss": super().training_step(batch, batch_idx)}

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class LearningRates(Callback):
    def __init__(self):
        self.found = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.found.append(trainer.optimizers[0].param_groups[0]["lr"])


def train(out, strategy, devices):
    """Fit, validate, test and predict; write what this rank has found."""
    model, losses, rates = Model(), Losses(), LearningRates()
    trainer = quiet_trainer(
        strategy,
        devices=devices,
        accumulate_grad_batches=2,
        gradient_clip_val=0.1,
        callbacks=[losses, rates],
        default_root_dir=out,
    )
    trainer.fit(model, loader(BATCH * STEPS, BATCH // devices), loader(EVALUATED, BATCH))
    logged = {"val_loss": float(trainer.callback_metrics["val_loss"])}
    logged |= trainer.test(model, loader(EVALUATED, BATCH), verbose=False)[0]
    predictions = torch.cat(trainer.predict(model, loader(EVALUATED, BATCH))).sum(1).tolist()
    found = {"losses": losses.losses, "lr": rates.found, "logged": logged, "predictions": predictions}
    Path(f"{out}/{strategy}.{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, number, *names = sys.argv[1:]
    for name in names:
        train(folder, name, int(number))
