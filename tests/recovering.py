"""Program that test_recovery.py breaks: ``recovering.py STRATEGY METHOD CASE [EPOCHS]``."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

import dstrat.strategies
from dstrat import Callback, InMemoryCheckpoint, ModelCheckpoint, Trainer, TrainModule

NUM_SAMPLES = 200


def write(name, text):
    unfinished = Path(f"{name}.unfinished")
    unfinished.write_text(str(text))
    unfinished.replace(name)


class Numbers(Dataset):
    def __init__(self, count=NUM_SAMPLES):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.tensor([index / self.count, 1.0]), index


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = self.layers(batch[0]).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Diary(Callback):
    """Writes the process id of each rank, where it began, each batch that it has trained on, and the end.

    Args:
        attempt: Its number, from 0, if the Trainer does not know it.
    """

    def __init__(self, attempt=None):
        self.attempt = attempt

    def name_of(self, trainer):
        return f"{trainer.restart_count if self.attempt is None else self.attempt}-{trainer.global_rank}"

    def setup(self, trainer, module, stage):
        write(f"pid-{self.name_of(trainer)}", os.getpid())

    def on_train_start(self, trainer, module):
        name = self.name_of(trainer)
        write(f"start-{name}", trainer.fit_loop.batches_seen)
        self.path = Path(f"batches-{name}")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        indices = " ".join(map(str, batch[1].tolist()))
        with self.path.open("a") as batches:
            batches.write(f"{trainer.fit_loop.batches_seen} {trainer.current_epoch} {indices}\n")
        time.sleep(0.01)

    def on_train_end(self, trainer, module):
        weights = trainer.strategy.module_state_dict()
        if trainer.is_global_zero:
            torch.save({name: value.clone() for name, value in weights.items()}, "weights.pt")


class Fail(Callback):
    """Fails in rank 1, in the way that its name says."""

    def __init__(self, case):
        self.case = case

    def on_train_start(self, trainer, module):
        if self.case == "raise at the start" and trainer.global_rank == 1:
            raise ValueError("bad argument")

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if trainer.global_rank != 1 or trainer.global_step != 7:
            return
        if self.case == "raise":
            raise ValueError(f"bad sample {os.getpid()}")
        if self.case == "exit":
            sys.exit(3)
        if self.case == "interrupt":
            os.kill(os.getppid(), signal.SIGINT)
        if self.case == "kill once" and trainer.restart_count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if self.case == "raise once" and trainer.restart_count == 0:
            raise ConnectionError("the store is not there")


def main(strategy, method, case, num_epochs="1"):
    torch.manual_seed(0)
    in_memory = [ModelCheckpoint(), InMemoryCheckpoint(every_n_train_steps=5)]
    checkpoints = in_memory if case == "killed, in memory" else [ModelCheckpoint(every_n_train_steps=5)]
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=getattr(dstrat.strategies, strategy)(start_method=method),
        max_epochs=int(num_epochs),
        max_restarts=20 if case.startswith("killed") else 3,
        log_every_n_steps=1,
        default_root_dir=".",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*checkpoints, Diary(), Fail(case)],
    )
    trainer.fit(Net(), DataLoader(Numbers(), batch_size=2, shuffle=True))
    if trainer.is_global_zero:
        print(f"{trainer.restart_count} restarts, {len(trainer.failed_attempts)} failed attempts")


if __name__ == "__main__":
    if "DSTRAT_RESTART_COUNT" in os.environ:  # a rank that runs the script once more
        write(f"pid-{os.environ['DSTRAT_RESTART_COUNT']}-{os.environ['RANK']}", os.getpid())
    main(*sys.argv[1:])
