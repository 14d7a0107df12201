"""Trainings through the Trainer on XLA's CPU backend, in processes of their own, and what they count."""

import os

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dstrat import Callback, Trainer, TrainModule

FEATURES, BATCH, STEPS = 8, 8, 20
OPTIONS = {
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "max_epochs": 1,
}


class Numbers(Dataset):
    """Inputs and targets that every process computes alike."""

    def __init__(self, length):
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(length, FEATURES, generator=generator)
        self.targets = self.inputs[:, :2] - self.inputs[:, 2:4]

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        return self.inputs[index], self.targets[index]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(TrainModule):
    """A small network, which keeps its losses on the device.

    By default its optimizer is SGD: its graph compiles in a third of the time, and gradients that are summed rather
    than averaged change its losses, as they would not with Adam.
    """

    def __init__(self, dropout=0.0, adam=False):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(FEATURES, 12)
        self.blocks = nn.ModuleList(Block(12) for _ in range(2))
        self.dropout = nn.Dropout(dropout)
        self.last = nn.Linear(12, 2)
        self.adam, self.losses = adam, []

    def training_step(self, batch):
        x = self.first(batch[0])
        for block in self.blocks:
            x = self.dropout(block(x))
        loss = nn.functional.mse_loss(self.last(x), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self):
        if self.adam:
            return torch.optim.AdamW(self.parameters(), lr=0.01)
        return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)


class Tied(Net):
    """Two of its layers share a weight."""

    def __init__(self):
        super().__init__()
        self.blocks[1].up.weight = self.blocks[0].up.weight

    @property
    def is_tied(self):
        return self.blocks[1].up.weight is self.blocks[0].up.weight


def loader(steps=STEPS, accumulate=1, shuffle=False):
    return DataLoader(Numbers(BATCH * steps * accumulate), batch_size=BATCH, shuffle=shuffle)


class SavesAt(Callback):
    """Saves a checkpoint after some optimizer steps."""

    saves_checkpoints = True

    def __init__(self, step, path):
        self.step, self.path = step, path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.global_step == self.step and not os.path.exists(self.path):  # noqa: PTH110 - a string
            trainer.save_checkpoint(self.path)


def begin(num_devices=1):
    """Let the process have so many XLA devices, and start the runtime before autograd."""
    os.environ["PJRT_DEVICE"], os.environ["CPU_NUM_DEVICES"] = "CPU", str(num_devices)


def fit(
    strategy, net=None, data=None, *, devices=1, accelerator="xla", precision=None, callbacks=(), resume=None, **options
):
    """Train; return losses, and weights by name, as lists."""
    net = net or Net()
    trainer = Trainer(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        precision=precision,
        callbacks=list(callbacks),
        **{**OPTIONS, **options},
    )
    trainer.fit(net, data or loader(accumulate=options.get("accumulate_grad_batches", 1)), ckpt_path=resume)
    return {
        "losses": [float(loss) for loss in net.losses],
        "weights": {name: value.detach().flatten().tolist() for name, value in net.named_parameters()},
        "devices": sorted({value.device.type for value in net.parameters()}),
    }


class CountsSteps(Callback):
    """Notes what torch_xla has counted, after the first steps and at the end."""

    warm_up = 8

    def __init__(self):
        self.warm, self.end = None, None

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if batch_idx + 1 == self.warm_up:
            self.warm = counts()

    def on_train_end(self, trainer, module):
        self.end = counts()

    @property
    def more(self):
        return {what: self.end[what] - self.warm[what] for what in self.end}


def counts():
    """Return how often torch_xla has compiled and run graphs, and read values from the device."""
    from torch_xla.debug import metrics

    def seen(name):
        return (metrics.metric_data(name) or (0,))[0]

    return {
        "compiled": metrics.counter_value("UncachedCompile") or 0,
        "run": metrics.counter_value("MarkStep") or 0,
        "read": seen("TransferFromDeviceTime"),
    }
