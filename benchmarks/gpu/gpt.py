"""A GPT of 124 million parameters, and an MLP: the same training step for every arm of a measurement on a GPU."""

from __future__ import annotations

import copy
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it
from torch.utils.data import TensorDataset

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """Size of a GPT and of its batches.

    Attributes:
        layers: Number of blocks.
        width: Length of a token's vector.
        heads: Attention heads of a block.
        vocabulary: Number of different tokens.
        context: Tokens of a sequence.
        batch_size: Sequences of a batch.
    """

    layers: int = 12
    width: int = 768
    heads: int = 12
    vocabulary: int = 50304  # GPT-2's, rounded up to a multiple of 64
    context: int = 1024
    batch_size: int = 16


GPT_124M = Shape()
TINY_GPT = Shape(layers=2, width=32, heads=2, vocabulary=64, context=16, batch_size=2)


class Block(nn.Module):
    """Causal attention and two linear maps, both added to what came in."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width)
        self.inputs = nn.Linear(shape.width, 3 * shape.width)
        self.output = nn.Linear(shape.width, shape.width)
        self.norm = nn.LayerNorm(shape.width)
        self.up = nn.Linear(shape.width, 4 * shape.width)
        self.down = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of the same shape (batch, length, width), with what this block adds."""
        batch, length, width = x.shape
        q, k, v = self.inputs(self.attention_norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """GPT-2 with its embedding shared with the last layer; calling it returns the loss."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.positions = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.tokens.weight
        nn.init.normal_(self.tokens.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the mean cross-entropy for tokens of shape (batch, context + 1)."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        return F.cross_entropy(self.head(self.norm(self.blocks(x))).flatten(0, 1), targets.flatten())

    def flops(self) -> float:
        """Return the operations of a training step on a batch: 6 N + 12 L d T for each token.

        The formula is that of PaLM (https://arxiv.org/abs/2204.02311, appendix B), without those of the embeddings.
        """
        shape = self.shape
        numel = sum(parameter.numel() for parameter in self.parameters()) - self.positions.weight.numel()
        per_token = 6 * numel + 12 * shape.layers * shape.width * shape.context
        return float(per_token) * shape.batch_size * shape.context


class MLP(nn.Module):
    """Three small layers; calling it returns the loss.  Its steps take as long as launching them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))

    def forward(self, x: Tensor) -> Tensor:
        """Return the loss for x of shape (batch, 32)."""
        return F.mse_loss(self.layers(x), x)


def make_module(name: str, *, tiny: bool) -> Any:
    """Return a module with the same weights each time."""
    return copy.deepcopy(_first_module(name, tiny))


@functools.cache  # drawing 124 million numbers takes seconds
def _first_module(name: str, tiny: bool) -> nn.Module:
    torch.manual_seed(0)
    return MLP() if name == "mlp" else GPT(TINY_GPT if tiny else GPT_124M)


def make_dataset(name: str, steps: int, *, tiny: bool) -> tuple[TensorDataset, int]:
    """Return the samples of some steps, and the size of a batch."""
    generator = torch.Generator().manual_seed(0)
    if name == "mlp":
        return TensorDataset(torch.randn(steps * 8, 32, generator=generator)), 8
    shape = TINY_GPT if tiny else GPT_124M
    size = (min(steps, 8) * shape.batch_size, shape.context + 1)
    tokens = torch.randint(shape.vocabulary, size, generator=generator)
    return TensorDataset(tokens.repeat(-(-steps // 8), 1)[: steps * shape.batch_size]), shape.batch_size


def make_optimizer(module: nn.Module) -> Optimizer:
    """Return the optimizer of every arm."""
    return torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)
