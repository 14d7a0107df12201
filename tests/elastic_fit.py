"""Program that test_elastic.py breaks: ``elastic_fit.py STRATEGY METHOD RANKS CASE [CKPT_PATH BATCH_SIZE ACCUMULATE]``.

With a checkpoint it is a fit that is resumed from that, on a number of ranks that stays.
"""

import os
import random
import shutil
import signal
import sys
import threading
import time
from pathlib import Path

import torch
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.data import DataLoader, Dataset

import dstrat.strategies
from dstrat import Callback, InMemoryCheckpoint, ModelCheckpoint, Trainer, TrainModule

NUM_SAMPLES, BATCH_SIZE, NUM_EPOCHS = 240, 4, 2


def write(name, text):
    unfinished = Path(f"{name}.unfinished")
    unfinished.write_text(str(text))
    unfinished.replace(name)


class Numbers(Dataset):
    def __len__(self):
        return NUM_SAMPLES

    def __getitem__(self, index):
        return torch.tensor([index / NUM_SAMPLES, 1.0]), index


class Cooling(torch.nn.Module):
    """Divides by a temperature and a count, which begin anew in a resumed fit, as no checkpoint has them."""

    def __init__(self):
        super().__init__()
        self.temperature = 2.0
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x):
        if self.training:
            self.temperature *= 0.99
            self.seen += 1
        return x / (self.temperature + self.seen / 100)


class Net(TrainModule):
    def __init__(self, width):
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(2, width),
            torch.nn.Dropout(0.2),
            torch.nn.Linear(width, width),
            Cooling(),
            torch.nn.Linear(width, 1),
        )
        self.first_weight = self.layers[0].weight
        self.replaces = False

    def setup(self, stage):
        self.layers[2].register_forward_hook(lambda _layer, _inputs, output: output / 2)
        if self.trainer.strategy.replicates_state:  # shards have no hooks of parameters
            self.layers[2].bias.register_hook(lambda gradient: gradient / 2)
        if self.replaces:
            weight_norm(self.layers[2])

    def configure_model(self):
        self.layers[4] = torch.nn.Sequential(self.layers[4])

    def training_step(self, batch, batch_idx):
        loss = (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).pow(2).mean()
        self.log("loss", loss)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.layers(batch[0]).mean())

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 3), "interval": "step"},
        }


class Diary(Callback):
    """Writes the process id of each rank, where it began, each batch that it has trained on, and the end."""

    def __init__(self, *, waits_for_newcomers):
        self.waits_for_newcomers, self.waited_in = waits_for_newcomers, set()

    def group_of(self, trainer):
        """Return the number of the group of ranks, or of the attempt; no two have the same one."""
        if self.waits_for_newcomers and trainer.restart_count and "DSTRAT_GROUP" not in os.environ:
            return 10 + trainer.restart_count  # all ranks are new ones, perhaps after a group that has grown
        return max(trainer.restart_count, int(os.environ.get("DSTRAT_GROUP", "0")))

    def name_of(self, trainer):
        return f"{self.group_of(trainer)}-{trainer.global_rank}"

    def setup(self, trainer, module, stage):
        write(f"pid-{self.name_of(trainer)}", os.getpid())

    def on_train_start(self, trainer, module):
        name = self.name_of(trainer)
        if trainer.is_global_zero and self.group_of(trainer) and trainer.ckpt_path:
            shutil.copytree(trainer.ckpt_path, f"resumed-{self.group_of(trainer)}.ckpt")
        write(f"start-{name}", trainer.global_step)
        trainer.min_steps = self.group_of(trainer)  # without effect, as nothing stops this training
        self.path = Path(f"batches-{name}")

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        in_group = trainer.fit_loop.in_group
        step = trainer.global_step + (in_group > 0)  # the one that its gradients are for
        values = (time.time(), step, in_group, trainer.current_epoch, outputs["loss"].item().hex())
        with self.path.open("a") as batches:
            batches.write(" ".join(map(str, [*values, *batch[1].tolist()])) + "\n")
        time.sleep(0.005)
        if self.waits_for_newcomers:
            self.wait_for_newcomers(trainer)

    def wait_for_newcomers(self, trainer):
        """Wait until new processes can join in place of all that were killed; a short fit would be over before."""
        missing = int(os.environ.get("DSTRAT_NUM_STARTED", "0")) - trainer.world_size
        group = os.environ.get("DSTRAT_GROUP", "0")
        if missing <= 0 or group in self.waited_in:
            return
        self.waited_in.add(group)
        deadline = time.monotonic() + 100
        while not Path(os.environ["DSTRAT_JOB"], f"newcomers-{group}").exists() and time.monotonic() < deadline:
            time.sleep(0.02)

    def on_train_end(self, trainer, module):
        weights = trainer.strategy.module_state_dict()
        if trainer.is_global_zero:
            torch.save({name: value.clone() for name, value in weights.items()}, "weights.pt")


def end_when_announced():
    """End this process when the ranks leave their group for one with it."""
    while not Path(os.environ["DSTRAT_JOB"], "newcomers-1").exists():
        time.sleep(0.001)
    time.sleep(random.uniform(0, 0.04))
    os.kill(os.getpid(), signal.SIGKILL)


class Raise(Callback):
    def __init__(self, attempt, step):
        self.attempt, self.step = attempt, step

    def on_train_batch_start(self, trainer, module, batch, batch_idx) -> None:
        if (trainer.restart_count, trainer.global_rank, trainer.global_step) == (self.attempt, 1, self.step):
            raise ValueError("an error of the program")


def leave_out(module, state, prefix, metadata):
    for name in [name for name in state if name.startswith(f"{prefix}layers.2.")]:
        del state[name]


def main(strategy, method, ranks, case, ckpt_path="", batch_size=BATCH_SIZE, accumulate=1):
    torch.manual_seed(0)
    checkpoints = {
        "in memory": [ModelCheckpoint(), InMemoryCheckpoint(every_n_train_steps=5)],
        "during the copy": [ModelCheckpoint(), InMemoryCheckpoint(every_n_train_steps=1)],
        "on the disk": [ModelCheckpoint(every_n_train_steps=5)],
        "no checkpoint yet": [ModelCheckpoint(every_n_train_steps=1000)],
        "weights left out": [ModelCheckpoint(every_n_train_steps=5)],
        "parameter replaced": [ModelCheckpoint(every_n_train_steps=5)],
        "raises": [ModelCheckpoint(every_n_train_steps=5), Raise(0, 12)],
        "raises later": [ModelCheckpoint(every_n_train_steps=5), Raise(1, 27)],
        "replaced": [ModelCheckpoint(), InMemoryCheckpoint(every_n_train_steps=5)],
        "replaced in vain": [ModelCheckpoint(), InMemoryCheckpoint(every_n_train_steps=5)],
        "replaced too late": [ModelCheckpoint(), InMemoryCheckpoint(every_n_train_steps=5)],
        "resumed": [],
    }
    elastic = {} if ckpt_path else {"max_restarts": 5, "elastic": "replace" if case.startswith("replaced") else True}
    trainer = Trainer(
        accelerator="cpu",
        devices=int(ranks),
        strategy=getattr(dstrat.strategies, strategy)(start_method=method),
        max_epochs=NUM_EPOCHS,
        log_every_n_steps=1,
        accumulate_grad_batches=int(accumulate),
        default_root_dir=".",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*checkpoints[case], Diary(waits_for_newcomers=case in ("replaced", "replaced too late"))],
        **elastic,
    )
    net = Net(256 if case == "during the copy" else 16)
    if case == "replaced in vain" and "DSTRAT_NEWCOMER" in os.environ:
        raise OSError("the data is away")
    if case == "replaced too late" and "DSTRAT_NEWCOMER" in os.environ:
        threading.Thread(target=end_when_announced, daemon=True).start()
    net.replaces = case == "parameter replaced"
    if case == "weights left out":
        net.layers[2].requires_grad_(requires_grad=False)
        net.register_state_dict_post_hook(leave_out)
    workers = {"num_workers": 1, "persistent_workers": True} if case == "on the disk" else {}
    loader = DataLoader(Numbers(), batch_size=int(batch_size), shuffle=True, **workers)
    trainer.fit(net, loader, DataLoader(Numbers(), batch_size=16), ckpt_path=ckpt_path or None)
    if trainer.is_global_zero:
        print(f"{trainer.restart_count} restarts, {len(trainer.failed_attempts)} failed attempts")
        print(f"{trainer.accumulate_grad_batches} accumulated, at least {trainer.min_steps} steps")
        print(f"{trainer.world_size} ranks at the end")


if __name__ == "__main__":
    main(*sys.argv[1:])
