"""A hand-written loop, its data and its modules, which train with a strategy and without any Trainer."""

from __future__ import annotations

import torch
from tests.accelerators import make_accelerator
from torch import nn

from dstrat.builtin.precision.mixed import MixedPrecision
from dstrat.builtin.precision.true import TruePrecision
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import MisuseError
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.interfaces.optimizers import Optimization
from dstrat.interfaces.strategy import Parts

STEPS = 20
BATCH = 8


class NoCheckpoints(CheckpointIO):
    def save_checkpoint(self, checkpoint, path):
        raise NotImplementedError

    load_checkpoint = save_checkpoint


class Net(nn.Module):
    """A small network with a buffer, whose training step returns the loss."""

    learning_rate = 0.05

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.make_layers()
        self.register_buffer("seen", torch.zeros(()))

    def make_layers(self):
        self.layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3))

    def training_step(self, batch, batch_idx):
        inputs, targets = batch
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=self.learning_rate)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class BlockNet(Net):
    """A small network with blocks, parts outside of them and a buffer."""

    learning_rate = 0.01

    def make_layers(self):
        self.first = nn.Linear(6, 10)
        self.blocks = nn.ModuleList(Block(10) for _ in range(3))
        self.last = nn.Linear(10, 3)

    def layers(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Run:
    """What a strategy asks of whoever runs it."""

    accumulate_grad_batches = 1
    gradient_clip_val = None
    gradient_clip_algorithm = "norm"

    def __init__(self, module, is_fitting=True):
        self.module = module
        self.is_fitting = is_fitting

    def configure_optimizers(self):
        return Optimization(optimizers=(self.module.configure_optimizers(),))


def parts(cluster=None, precision="32-true", devices=None):
    """The parts that a test's strategy gets."""
    size, accelerator = devices or (1 if cluster is None else cluster.world_size), make_accelerator()
    return Parts(
        accelerator=accelerator,
        parallel_devices=tuple(accelerator.get_parallel_devices(range(size))),
        cluster_environment=cluster,
        checkpoint_io=NoCheckpoints(),
        precision_plugin=TruePrecision(precision) if precision.endswith("true") else MixedPrecision(precision),
    )


def start(strategy, module, given, is_fitting=True):
    """Bring a strategy to where steps can run."""
    strategy.receive(given)
    strategy.connect(module)
    strategy.setup_environment()
    strategy.setup(Run(strategy.module, is_fitting))


def batches(steps=STEPS, batch=BATCH):
    """The same global batches for everybody."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        inputs = torch.randn(batch, 6, generator=generator)
        yield inputs, inputs[:, :3] - inputs[:, 3:]


def share(strategy, batch):
    """This rank's part of a global batch."""
    where = {"rank": 0, "num_replicas": 1} | strategy.distributed_sampler_kwargs
    return tuple(tensor[where["rank"] :: where["num_replicas"]] for tensor in batch)


def train(strategy, steps=STEPS, accumulate=1, clip=None, algorithm="norm"):
    """Train; return the global loss of each optimizer step."""
    losses = []
    groups = zip(*[iter(batches(steps * accumulate))] * accumulate, strict=True)
    optimizer = strategy.optimizers[0]
    for index, group in enumerate(groups):

        def closure(group=group, index=index):
            optimizer.zero_grad()
            with strategy.no_backward_sync():
                parts = [one_pass(strategy, batch, index, accumulate) for batch in group[:-1]]
            parts.append(one_pass(strategy, group[-1], index, accumulate))
            strategy.unscale_gradients(optimizer)
            if clip is not None:
                strategy.clip_gradients(optimizer, clip, algorithm)
            return sum(parts)

        loss = strategy.reduce(strategy.optimizer_step(optimizer, closure, strategy.model))
        strategy.accelerator.end_graph("optimizer_step")
        losses.append(float(loss))
    return losses


def one_pass(strategy, batch, index, accumulate):
    loss = strategy.training_step(strategy.batch_to_device(share(strategy, batch)), index) / accumulate
    strategy.backward(loss)
    strategy.accelerator.end_graph("backward")
    return loss.detach()


def losses_of(strategy, module, given, **options):
    """Start, train and end; return the losses."""
    start(strategy, module, given)
    losses = train(strategy, **options)
    strategy.teardown()
    return losses


def single_device_losses(module, precision="32-true", **options):
    """What one device without any communication gives."""
    return losses_of(SingleDeviceStrategy(), module, parts(precision=precision), **options)


def misuse_in_a_step(strategy):
    """Return the message of the MisuseError that a step raises, or None, and end the run."""
    try:
        train(strategy, steps=1)
    except MisuseError as error:
        return str(error)
    finally:
        strategy.teardown()
    return None
