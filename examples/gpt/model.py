"""A small byte-level GPT: network, training step and text generation."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.optim.lr_scheduler import LambdaLR

from dstrat import TrainModule
from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.optim import Optimizer

BYTES = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Size of the network.

    Attributes:
        layers: Number of blocks.
        width: Embedding size.
        heads: Attention heads per block; ``width`` must be a multiple of it.
        context: Context length in bytes.
    """

    layers: int = 4
    width: int = 192
    heads: int = 6
    context: int = 64


class Attention(nn.Module):
    """Causal self-attention with rotary positions (https://arxiv.org/abs/2104.09864)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.inputs = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.output = nn.Linear(shape.width, shape.width, bias=False)
        half = shape.width // shape.heads // 2
        angles = torch.arange(shape.context)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attention output for x of shape (batch, length, width)."""
        batch, length, width = x.shape
        q, k, v = self.inputs(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(self._rotate(q), self._rotate(k), v, is_causal=True)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        a, b = x.chunk(2, dim=-1)
        # The type of x, because all three inputs of the attention need the same one under mixed precision.
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x)


class Block(nn.Module):
    """Transformer block: attention and an MLP, each with a residual connection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.attention = Attention(shape)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.up = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.down = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the block, with the shape of x."""
        x = x + self.attention(self.attention_norm(x))
        return x + self.down(F.relu(self.up(self.mlp_norm(x))).square())


class GPT(TrainModule):
    """Byte-level language model.

    Args:
        shape: Size of the network.
        learning_rate: Highest learning rate, after the warm-up.
        steps: Optimizer steps of the training, over which the learning rate decays.
        warmup: Steps of linear warm-up.
    """

    def __init__(self, shape: Shape, *, learning_rate: float, steps: int, warmup: int = 30) -> None:
        super().__init__()
        self.shape, self.learning_rate, self.steps, self.warmup = shape, learning_rate, steps, warmup
        self.embedding = nn.Embedding(BYTES, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width, bias=False)
        self.head = nn.Linear(shape.width, BYTES, bias=False)
        self._initialize()

    def _initialize(self) -> None:
        """Initialize each block to the identity, and the output to equal probabilities of all bytes."""
        for name, weight in self.named_parameters():
            if name.endswith(("attention.output.weight", "down.weight", "head.weight")):
                nn.init.zeros_(weight)
            elif name.endswith(("inputs.weight", "up.weight")):
                nn.init.normal_(weight, std=self.shape.width**-0.5)

    def configure_model(self) -> None:
        """Apply tensor parallelism to the MLP of each block, if the strategy has a tensor parallel mesh."""
        mesh = device_mesh_of(self)
        if mesh is None or "tensor_parallel" not in (mesh.mesh_dim_names or ()):
            return
        for block in self.blocks:
            parallelize_module(block, mesh["tensor_parallel"], {"up": ColwiseParallel(), "down": RowwiseParallel()})

    def forward(self, text: Tensor) -> Tensor:
        """Return the logits of the next byte, (batch, length, 256), for bytes of shape (batch, length)."""
        logits: Tensor = self.head(self.norm(self.blocks(self.embedding(text))))
        return logits

    def loss(self, batch: Tensor) -> Tensor:
        """Return the mean cross-entropy in nats per byte, for windows of shape (batch, length + 1)."""
        windows = batch.long()
        return F.cross_entropy(self(windows[:, :-1]).flatten(0, 1).float(), windows[:, 1:].flatten())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002 - not needed
        """Return the loss of one batch."""
        loss = self.loss(batch)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:  # noqa: ARG002 - not needed
        """Evaluate one batch."""
        self.log("val_loss", self.loss(batch), prog_bar=True)

    def configure_optimizers(self) -> dict[str, Any]:
        """Return AdamW with a linear warm-up and a cosine decay of the learning rate."""
        optimizer: Optimizer = torch.optim.AdamW(
            self.parameters(), lr=self.learning_rate, betas=(0.9, 0.99), weight_decay=0.1, fused=True
        )
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": LambdaLR(optimizer, self._rate), "interval": "step"},
        }

    def _rate(self, step: int) -> float:
        rise = min(1.0, (step + 1) / self.warmup)
        return rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * min(1.0, step / self.steps))))

    @torch.no_grad()
    def write(self, start: bytes, length: int, *, temperature: float = 0.8, seed: int = 0) -> bytes:
        """Continue a text.

        Args:
            start: The text to continue; not empty.
            length: Number of bytes to generate.
            temperature: Values below 1 favor likely bytes.
            seed: The same seed gives the same text.
        """
        self.eval()
        random = torch.Generator().manual_seed(seed)
        text = list(start)
        for _ in range(length):
            seen = torch.tensor([text[-self.shape.context :]], device=self.device)
            probabilities = (self(seen)[0, -1].float().cpu() / temperature).softmax(dim=-1)
            text.append(int(torch.multinomial(probabilities, 1, generator=random)))
        return bytes(text)


def device_mesh_of(module: TrainModule) -> DeviceMesh | None:
    """Return the device mesh of the strategy; None without one, and outside a run."""
    try:
        return module.device_mesh
    except MisuseError:
        return None
