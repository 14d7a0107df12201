"""A program that goes on with trainings of XLA under other strategies, on another torch, and saves them.

Its argument is a JSON object: ``max_steps``, and ``moves``, each with ``strategy``, ``start`` and ``checkpoint``.  The
losses of a move are saved beside its checkpoint.
"""

import importlib
import json
import sys
from pathlib import Path

import torch
from xla_fit import QUIET, Regression, Saving, data

from dstrat import Callback, Trainer, seed_everything
from dstrat_ddp import DDPStrategy
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_fsdp import FSDPStrategy
from dstrat_ipu import IPUStrategy

RANKS = 2


def made(strategy):
    """Return a strategy whose ranks are copies of this process, so that they cost no imports."""
    if strategy == "deepspeed":
        return DeepSpeedStrategy(stage=2, start_method="fork")
    if strategy == "ipu_strategy":
        return IPUStrategy()
    if strategy == "ddp_sharded":
        return importlib.import_module("dstrat_fairscale").DDPShardedStrategy(start_method="fork")
    return {"ddp": DDPStrategy, "fsdp": FSDPStrategy, "hpu_fsdp": FSDPStrategy}[strategy](start_method="fork")


class OfCalls(Regression):
    """The same for compiled steps, which run once: without losses that are kept in them."""

    def training_step(self, batch, batch_idx):
        return torch.nn.functional.mse_loss(self.net(batch[0]), batch[1])


class WritingLosses(Callback):
    """Writes the losses of all processes' batches, as these processes end with the fit."""

    def __init__(self, path):
        self.path, self.losses = path, []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        loss = outputs["loss"]
        self.losses.append(trainer.strategy.reduce(loss.detach().mean()))

    def on_train_end(self, trainer, module):
        if trainer.is_global_zero:
            self.path.write_text(json.dumps([float(loss) for loss in self.losses]))


def main():
    asked = json.loads(sys.argv[1])
    if any(move["strategy"].startswith("hpu") for move in asked["moves"]):
        importlib.import_module("habana_frameworks.torch")  # before the first backward pass of this process
    for move in asked["moves"]:
        hardware = move["strategy"].partition("_")[0]
        seed_everything(3, verbose=False)
        trainer = Trainer(
            **QUIET,
            strategy=made(move["strategy"]),
            accelerator=hardware if hardware in ("hpu", "ipu") else "cpu",
            devices=RANKS,
            max_epochs=-1,
            max_steps=asked["max_steps"],
            callbacks=[Saving(move["checkpoint"]), WritingLosses(Path(move["checkpoint"] + ".losses"))],
        )
        module = (OfCalls if hardware == "ipu" else Regression)(scheduled=True)
        trainer.fit(module, data(batch_size=8 // RANKS, shuffle=False), ckpt_path=move["start"])


if __name__ == "__main__":
    main()
