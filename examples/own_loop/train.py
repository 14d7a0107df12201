"""A custom training loop with any strategy: ``python examples/own_loop/train.py --strategy ddp --devices 2``.

Run it again with more ``--epochs`` to resume from the checkpoint, also with another strategy or other devices.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.utils.data import DataLoader, TensorDataset

import dstrat

if TYPE_CHECKING:
    from dstrat import OwnLoop

BATCH = 32
"""Samples per optimizer step, over all processes."""


class Net(nn.Module):
    """Classifies points by the ten parts of a spiral; any module can be used."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))

    def forward(self, points: Tensor) -> Tensor:
        """Return the logits, (batch, 10), of points of shape (batch, 2)."""
        logits: Tensor = self.layers(points)
        return logits

    def loss(self, points: Tensor, parts: Tensor) -> Tensor:
        """Return the mean cross-entropy."""
        return F.cross_entropy(self(points), parts)


def spiral(samples: int, seed: int) -> TensorDataset:
    """Return points on a noisy spiral, each with the index of its part."""
    generator = torch.Generator().manual_seed(seed)
    part = torch.randint(10, (samples,), generator=generator)
    turn = (part + torch.rand(samples, generator=generator)) / 10
    angle = 4 * torch.pi * turn
    points = torch.stack((angle.cos(), angle.sin()), dim=1) * turn[:, None]
    return TensorDataset(points + 0.01 * torch.randn(samples, 2, generator=generator), part)


def train(loop: OwnLoop, epochs: int, folder: Path) -> None:
    """Train in each process of the job."""
    strategy, net = loop.strategy, Net()
    batch_size = BATCH // strategy.distributed_sampler_kwargs.get("num_replicas", 1)
    loop.setup(net, lambda net: torch.optim.AdamW(net.parameters(), lr=3e-3), gradient_clip_val=1.0)
    loader = loop.training_loader(DataLoader(spiral(2048, seed=1), batch_size=batch_size, shuffle=True))
    held_out = loop.evaluation_loader(DataLoader(spiral(512, seed=2), batch_size=batch_size))

    last = newest(folder)
    state: dict[str, Any] = {"curve": []} if last is None else loop.load_checkpoint(last)
    while loader.epoch < epochs:
        for points, parts in loader:
            loss = loop.compute(net.loss, points, parts)
            loop.backward(loss)
            loop.step()
        value = accuracy(loop, net, held_out)
        state["curve"].append(value)
        if strategy.is_global_zero:
            print(f"epoch {loader.epoch}, step {loop.steps_done}: accuracy {value:.1%}")
        loop.save_checkpoint(folder / f"epoch-{loader.epoch:04}", state)


def accuracy(loop: OwnLoop, net: Net, loader: Any) -> float:
    """Return the accuracy over the points of all processes, from 0 to 1."""
    counts = torch.zeros(2, device=loop.strategy.root_device)  # correct predictions, points
    with loop.evaluation():
        for points, parts in loader:
            correct = loop.compute(net, points).argmax(1) == parts
            counts += torch.stack((correct.sum(), torch.tensor(len(parts), device=counts.device)))
    counts = loop.strategy.reduce(counts, reduce_op="sum")
    return float(counts[0] / counts[1])


def newest(folder: Path) -> Path | None:
    """Return the checkpoint of the last epoch; None if there is none yet."""
    return max(folder.glob("epoch-*"), default=None)


def main() -> None:
    """Read the command line, and launch the training."""
    parser = argparse.ArgumentParser(description="Train a small network on a spiral, with a custom training loop.")
    parser.add_argument("--strategy", default="auto", help="alias of a strategy; `dstrat strategies` lists them")
    parser.add_argument("--accelerator", default="auto", help="cpu, gpu, auto ...")
    parser.add_argument("--devices", default="auto", help="number or indices of the devices: 2, or 0,1, or auto")
    parser.add_argument("--precision", default="32-true", help="32-true, bf16-mixed, 16-mixed ...")
    parser.add_argument("--epochs", type=int, default=10, help="total number of epochs, with those of the checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("runs/own_loop"), help="folder of the checkpoints")
    options = parser.parse_args()
    torch.manual_seed(0)
    strategy = dstrat.build(
        strategy=options.strategy,
        accelerator=options.accelerator,
        devices=options.devices,
        precision=options.precision,
    )
    dstrat.OwnLoop(strategy).launch(train, options.epochs, options.folder)


if __name__ == "__main__":
    main()
