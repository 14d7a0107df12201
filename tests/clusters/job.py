"""Program that the tests of clusters start: ``job.py FOLDER [--option VALUE]...``; see ``--help``."""

import argparse
import json
import os
import platform
import signal
import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

from dstrat import Callback, ModelCheckpoint, Trainer, TrainModule

NUM_SAMPLES = 48
GLOBAL_BATCH = 4


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--strategy", default="ddp")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--num-nodes", type=int, default=1, help="0 takes it from torchrun")
    parser.add_argument("--max-epochs", type=int, default=1)
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step takes")
    parser.add_argument("--fail", choices=("raise", "kill"), help="how the failing rank fails")
    parser.add_argument("--fail-rank", type=int, default=1)
    parser.add_argument("--fail-step", type=int, default=6)
    parser.add_argument("--save-every", type=int, default=2)
    parser.add_argument("--deadline", type=float)
    parser.add_argument("--timeout", type=float, default=60.0, help="seconds that a rank waits for others")
    parser.add_argument("--requeue", action="store_true")
    parser.add_argument("--shuffle", action="store_true")
    return parser.parse_args()


class Numbers(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.rand(4, generator=generator), index


class Net(TrainModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        loss = (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss, sync_dist=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Diary(Callback):
    """Writes who each rank is, and which samples it has trained on; one file for each process."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_start(self, trainer, module):
        # torchrun counts no restart where an agent joins, so that rank 0 counts the files.
        number = trainer.strategy.broadcast(len(list(self.folder.glob("rank-*-0.jsonl"))))
        self.path = self.folder / f"rank-{number}-{trainer.global_rank}.jsonl"
        identity = {
            "pid": os.getpid(),
            "host": platform.node(),
            "slurm_node": os.environ.get("SLURMD_NODENAME"),
            "rank": trainer.global_rank,
            "local_rank": trainer.local_rank,
            "node_rank": trainer.node_rank,
            "world_size": trainer.world_size,
            "begin": trainer.global_step,
        }
        self.path.write_text(json.dumps(identity) + "\n")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        with self.path.open("a") as diary:
            diary.write(json.dumps([trainer.global_step, trainer.current_epoch, batch[1].tolist()]) + "\n")


class Fail(Callback):
    """Pauses in each step, and fails in one rank of the first attempt."""

    def __init__(self, options):
        self.options = options

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        time.sleep(self.options.pause)
        here = (trainer.global_rank, trainer.global_step) == (self.options.fail_rank, self.options.fail_step)
        if not here or attempt() != 0:
            return
        if self.options.fail == "raise":
            raise ValueError("bad sample")
        if self.options.fail == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


def attempt():
    """Return how often the engine has started the job before."""
    return int(os.environ.get("SLURM_RESTART_COUNT") or os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)


def main():
    options = parse()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    options.folder.mkdir(exist_ok=True)
    plugins = []
    if options.requeue:
        from dstrat.plugins.environments import SLURMEnvironment

        plugins.append(SLURMEnvironment(auto_requeue=True, requeue_signal=signal.SIGUSR1))
    trainer = Trainer(
        accelerator="cpu",
        devices=options.devices,
        num_nodes=options.num_nodes or int(os.environ["GROUP_WORLD_SIZE"]),
        strategy=strategy_of(options),
        plugins=plugins,
        max_epochs=options.max_epochs,
        preemption_deadline=options.deadline,
        log_every_n_steps=1,
        default_root_dir=options.folder,
        enable_progress_bar=False,
        callbacks=[ModelCheckpoint(every_n_train_steps=options.save_every), Diary(options.folder), Fail(options)],
    )
    batch_size = GLOBAL_BATCH // trainer.world_size
    trainer.fit(Net(), DataLoader(Numbers(), batch_size=batch_size, shuffle=options.shuffle), resume="auto")
    if trainer.is_global_zero:
        print("trained", trainer.global_step, "steps", flush=True)


def strategy_of(options):
    from datetime import timedelta

    from dstrat.strategies import DDPStrategy, FSDPStrategy

    cls = {"ddp": DDPStrategy, "fsdp": FSDPStrategy}[options.strategy]
    return cls(timeout=timedelta(seconds=options.timeout))


if __name__ == "__main__":
    sys.exit(main())
