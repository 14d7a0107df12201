"""The hand-written loop of all families, with a module that has more parts and a run that DeepSpeed asks for more."""

import torch
from tests import hand_loop
from tests.hand_loop import BlockNet, batches, parts, share, train
from torch import nn

from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.interfaces.optimizers import read_optimizers

__all__ = ["Net", "Run", "batches", "losses_of", "parts", "share", "single_device_losses", "start", "train"]


class Net(BlockNet):
    """A small network with blocks, and with a parameter and a buffer of its own."""

    def make_layers(self):
        super().make_layers()
        del self.blocks[2]
        self.scale = nn.Parameter(torch.ones(3))

    def layers(self, x):
        return super().layers(x) * self.scale

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


class Run(hand_loop.Run):
    """What the strategy asks of whoever runs it."""

    def __init__(self, module, is_fitting=True, accumulate=1, clip=None):
        super().__init__(module, is_fitting)
        self.accumulate_grad_batches = accumulate
        self.gradient_clip_val = clip

    def configure_optimizers(self):
        return read_optimizers(self.module.configure_optimizers())


def start(strategy, module, given, **run):
    """Bring a strategy to where steps can run."""
    strategy.receive(given)
    strategy.connect(module)
    strategy.setup_environment()
    strategy.setup(Run(strategy.module, **run))


def losses_of(strategy, module, given, accumulate=1, clip=None, steps=6):
    """Start, train and end; return the losses."""
    start(strategy, module, given, accumulate=accumulate, clip=clip)
    losses = train(strategy, accumulate=accumulate, clip=clip, steps=steps)
    strategy.teardown()
    return losses


def single_device_losses(module=None, precision="32-true", **options):
    """What one device without any communication gives."""
    return losses_of(SingleDeviceStrategy(), module or Net(), parts(precision=precision), **options)
