"""A program that goes on with trainings of XLA under strategies of torch.distributed, on another torch, and saves them.

Its argument is a JSON object: ``max_steps``, and ``moves``, each with ``strategy``, ``start`` and ``checkpoint``.
"""

import json
import sys

from xla_fit import QUIET, Regression, Saving, data

from dstrat import Trainer, seed_everything
from dstrat_ddp import DDPStrategy
from dstrat_deepspeed import DeepSpeedStrategy
from dstrat_fsdp import FSDPStrategy

RANKS = 2


def made(strategy):
    """Return a strategy whose ranks are copies of this process, so that they cost no imports."""
    if strategy == "deepspeed":
        return DeepSpeedStrategy(stage=2, start_method="fork")
    return {"ddp": DDPStrategy, "fsdp": FSDPStrategy}[strategy](start_method="fork")


def main():
    asked = json.loads(sys.argv[1])
    for move in asked["moves"]:
        seed_everything(3, verbose=False)
        trainer = Trainer(
            **QUIET,
            strategy=made(move["strategy"]),
            accelerator="cpu",
            devices=RANKS,
            max_epochs=-1,
            max_steps=asked["max_steps"],
            callbacks=[Saving(move["checkpoint"])],
        )
        trainer.fit(Regression(scheduled=True), data(batch_size=8 // RANKS, shuffle=False), ckpt_path=move["start"])


if __name__ == "__main__":
    main()
