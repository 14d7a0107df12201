"""A short training in which one rank fails: what ``faults.py`` runs, once for each fault."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Trainer, TrainModule

if TYPE_CHECKING:
    from collections.abc import Callable

STEP = 3


def _raise(error: BaseException) -> None:
    raise error


DEEDS: dict[str, Callable[[], Any]] = {
    "raises": lambda: _raise(ValueError("the fault")),
    "raises what a lost peer does": lambda: _raise(RuntimeError("Connection reset by peer")),
    "sys.exit(0)": lambda: sys.exit(0),
    "os._exit(0)": lambda: os._exit(0),
    "os._exit(3)": lambda: os._exit(3),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "SIGTERM": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "hangs": lambda: time.sleep(600),
    "is stopped": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "hangs in a save": lambda: time.sleep(600),
}


class Module(TrainModule):
    """Two layers, and the fault."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.options = options
        self.network = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the loss, or fail."""
        if batch_idx == STEP and self.options.fault != "hangs in a save":
            self._fail()
        loss: torch.Tensor = self.network(batch[0]).pow(2).mean()
        return loss

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:  # noqa: ARG002 - the hook's
        """Fail in a save."""
        if self.options.fault == "hangs in a save":
            self._fail()

    def _fail(self) -> None:
        if self.global_rank == self.options.rank:
            time.sleep(0.3)  # until the others wait
            Path(self.options.moment).write_text(repr(time.time()))
            DEEDS[self.options.fault]()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer."""
        return torch.optim.Adam(self.parameters())


def _strategy_class(family: str) -> Any:
    if family == "ddp":
        from dstrat_ddp import DDPStrategy

        return DDPStrategy
    if family == "fsdp":
        from dstrat_fsdp import FSDPStrategy

        return FSDPStrategy
    from dstrat_deepspeed import DeepSpeedStrategy

    return partial(DeepSpeedStrategy, stage=2)


def main() -> None:
    """Train on two CPU processes."""
    parser = argparse.ArgumentParser()
    for name in ("--mode", "--family", "--fault", "--moment"):
        parser.add_argument(name)
    parser.add_argument("--rank", type=int)
    parser.add_argument("--timeout", type=float)
    options = parser.parse_args()
    method = {} if options.mode == "torchrun" else {"start_method": options.mode}
    strategy = _strategy_class(options.family)(timeout=timedelta(seconds=options.timeout), **method)
    trainer = Trainer(
        strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, logger=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=Path(options.moment).parent,
    )  # fmt: skip
    trainer.fit(Module(options), DataLoader(TensorDataset(torch.randn(64, 8)), batch_size=4))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
