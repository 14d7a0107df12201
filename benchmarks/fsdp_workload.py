"""The network with repeated blocks that the measurements of sharded training train."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from dstrat import TrainModule
from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Callable

FEATURES, CLASSES = 64, 8


class Block(nn.Module):
    """A residual block with most of its parameters in two layers."""

    def __init__(self, width: int, activation: Callable[[Tensor], Tensor] = torch.relu) -> None:
        super().__init__()
        self.activation = activation
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the same shape, ``(batch, width)``."""
        return x + self.down(self.activation(self.up(self.norm(x))))


class Net(TrainModule):
    """Blocks between two layers; its losses stay in ``losses``.

    Args:
        width: Of the blocks.
        blocks: Their number.
        activation: Of the blocks.  Losses are compared with a smooth one: at the kink of a ReLU, rounding alone changes
            a gradient, and losses that AdamW makes 1e-5 apart follow.
        is_late: Whether the layers are made in ``configure_model``, where they take no memory until they are sharded.
    """

    def __init__(
        self,
        width: int,
        blocks: int = 6,
        *,
        activation: Callable[[Tensor], Tensor] = torch.relu,
        is_late: bool = False,
    ) -> None:
        super().__init__()
        self.sizes, self.activation, self.losses = (width, blocks), activation, []
        self.layers: nn.Sequential | None = None
        if not is_late:
            self._make()

    def _make(self) -> None:
        width, blocks = self.sizes
        torch.manual_seed(0)
        first, last = nn.Linear(FEATURES, width), nn.Linear(width, CLASSES)
        self.layers = nn.Sequential(first, *(Block(width, self.activation) for _ in range(blocks)), last)

    def configure_model(self) -> None:
        """Make the layers, and split the blocks where there is a mesh for it."""
        if self.layers is None:
            self._make()
        try:
            mesh = self.device_mesh
        except MisuseError:
            return
        if "tensor_parallel" in (mesh.mesh_dim_names or ()):
            for block in self.layers[1:-1]:
                parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, x: Tensor) -> Tensor:
        """Return what the layers make of a batch."""
        return self.layers(x)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        """Return the loss."""
        del batch_idx
        loss = nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Make the optimizer, which keeps two numbers for each parameter."""
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def loader(steps: int, batch_size: int, shares: int = 1) -> DataLoader[tuple[Tensor, ...]]:
    """Return a loader of global batches of the same samples, however many share them."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(steps * batch_size, FEATURES, generator=generator)
    y = torch.randn(steps * batch_size, CLASSES, generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=batch_size // shares)


def rank() -> int:
    """Return the rank that torchrun gave this process."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Return the number of processes."""
    return int(os.environ.get("WORLD_SIZE", "1"))
