"""DeepSeek-V3 in plain torch, for `dstrat choose` and `dstrat explain`: the shapes of 671 billion parameters.

    dstrat explain --model examples/layouts/deepseek.py:deepseek_v3 --devices 2048 --nodes 256 \
        --batch 15360 --strategy "mesh(pp=16, ep=64, microbatches=120)" --precision bf16-mixed --machine h100x8

Shapes are those of the technical report (https://arxiv.org/abs/2412.19437), without the prediction of a second token
and without 8-bit products.  Nothing of the module is allocated there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from dstrat import Pipeline, TrainModule

SEQUENCE = 4096


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of the model.

    Attributes:
        width: Number of features.
        layers: Number of blocks.
        dense_layers: Number of blocks, from the first on, without experts.
        heads: Number of heads.
        head_size: Features of a head that have no position, and of its values.
        rotary_size: Features of a head that have a position.
        query_rank: Number of features that queries are computed from.
        key_rank: Number of features that keys and values are computed from.
        hidden: Number of features between feed-forward layers.
        experts: Number of experts of a block.
        choices: Number of experts of a token.
        expert_hidden: Number of features between the layers of an expert.
        vocabulary: Number of tokens.
    """

    width: int
    layers: int
    dense_layers: int
    heads: int
    head_size: int
    rotary_size: int
    query_rank: int
    key_rank: int
    hidden: int
    experts: int
    choices: int
    expert_hidden: int
    vocabulary: int


class LatentAttention(nn.Module):
    """Attention whose queries, keys and values are computed from few features."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        full = shape.head_size + shape.rotary_size
        self.query_down = nn.Linear(shape.width, shape.query_rank, bias=False)
        self.query_norm = nn.RMSNorm(shape.query_rank)
        self.query_up = nn.Linear(shape.query_rank, shape.heads * full, bias=False)
        self.key_down = nn.Linear(shape.width, shape.key_rank + shape.rotary_size, bias=False)
        self.key_norm = nn.RMSNorm(shape.key_rank)
        self.key_up = nn.Linear(shape.key_rank, shape.heads * 2 * shape.head_size, bias=False)
        self.output = nn.Linear(shape.heads * shape.head_size, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of the same shape, attended."""
        shape = self.shape
        sizes = [shape.head_size, shape.rotary_size]
        queries = self.query_up(self.query_norm(self.query_down(x))).unflatten(-1, (shape.heads, -1)).transpose(1, 2)
        latent, positioned = self.key_down(x).split([shape.key_rank, shape.rotary_size], dim=-1)
        keys, values = (
            self.key_up(self.key_norm(latent)).unflatten(-1, (shape.heads, -1)).transpose(1, 2).chunk(2, dim=-1)
        )
        plain, turned = queries.split(sizes, dim=-1)
        queries = torch.cat((plain, rotated(turned)), dim=-1)
        positioned = rotated(positioned.unsqueeze(1)).expand(-1, shape.heads, -1, -1)
        keys = torch.cat((keys, positioned), dim=-1)
        # Fused kernels have heads of one size.
        padded = F.pad(values, (0, shape.rotary_size))
        attended = F.scaled_dot_product_attention(queries, keys, padded, is_causal=True)[..., : shape.head_size]
        out: Tensor = self.output(attended.transpose(1, 2).flatten(2))
        return out


def rotated(heads: Tensor) -> Tensor:
    """Return queries or keys of shape (batch, heads, sequence, size), turned by angles of their positions."""
    half = heads.shape[-1] // 2
    positions = torch.arange(heads.shape[-2], device=heads.device, dtype=torch.float32)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half, device=heads.device, dtype=torch.float32) / half)
    cosines, sines = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


class FeedForward(nn.Module):
    """A gated feed-forward layer."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of the same shape."""
        out: Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return out


class Experts(nn.Module):
    """Feed-forward layers of which each token takes a few; an expert takes its share of the tokens, and no more."""

    def __init__(self, experts: int, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) * hidden**-0.5)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """Return the weighted sum of the experts' outputs for each token; 0 of an expert that has enough others."""
        count, choices = index.shape
        experts = len(self.gate)
        capacity = -(-count * choices // experts)
        order = index.flatten().argsort(stable=True)
        sorted_index = index.flatten()[order]
        firsts = torch.searchsorted(sorted_index, torch.arange(experts, device=index.device))
        position = torch.arange(count * choices, device=index.device) - firsts[sorted_index]
        slot = torch.where(position < capacity, sorted_index * capacity + position, experts * capacity)
        rows = tokens.new_zeros(experts * capacity + 1, tokens.shape[-1]).index_copy(0, slot, tokens[order // choices])
        taken = rows[:-1].view(experts, capacity, -1)
        hidden = F.silu(torch.bmm(taken, self.gate)) * torch.bmm(taken, self.up)
        outputs = F.pad(torch.bmm(hidden, self.down).flatten(0, 1), (0, 0, 0, 1))[slot]
        weighted = outputs * weights.flatten()[order, None].to(outputs.dtype)
        return torch.zeros_like(tokens, dtype=outputs.dtype).index_add(0, order // choices, weighted)


class Mixture(nn.Module):
    """Experts of which a router chooses, and one for all tokens."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.choices = shape.choices
        self.router = nn.Linear(shape.width, shape.experts, bias=False)
        self.experts = Experts(shape.experts, shape.width, shape.expert_hidden)
        self.shared = FeedForward(shape.width, shape.expert_hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of the same shape."""
        tokens = x.flatten(0, -2)
        weights, index = self.router(tokens).sigmoid().topk(self.choices, dim=-1)
        routed: Tensor = self.experts(tokens, index, weights / weights.sum(-1, keepdim=True))
        out: Tensor = self.shared(x) + routed.view_as(x)
        return out


class Block(nn.Module):
    """Attention and a feed-forward layer, or experts."""

    def __init__(self, shape: Shape, *, has_experts: bool) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(shape.width), LatentAttention(shape)
        self.feed_forward_norm = nn.RMSNorm(shape.width)
        self.feed_forward = Mixture(shape) if has_experts else FeedForward(shape.width, shape.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of the same shape, with what this block adds."""
        x = x + self.attention(self.attention_norm(x))
        out: Tensor = x + self.feed_forward(self.feed_forward_norm(x))
        return out


class DeepSeek(TrainModule):
    """A decoder with experts, which predicts each token from those before it."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(
            Block(shape, has_experts=number >= shape.dense_layers) for number in range(shape.layers)
        )
        self.norm = nn.RMSNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each following token."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def configure_experts(self) -> list[nn.Module]:
        """Return the experts that ranks divide."""
        return [layer for layer in self.modules() if isinstance(layer, Experts)]

    def configure_pipeline(self) -> Pipeline:
        """Return the layers in order."""
        return Pipeline(
            model=self, loss=loss, layers=[self.tokens, *self.blocks, self.norm, self.head], inputs=lambda batch: batch
        )

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:  # noqa: ARG002 - not needed
        """Return the loss of a batch of tokens."""
        return loss(self(batch), batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=2e-4)


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of the tokens after the first one."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def deepseek_v3() -> tuple[DeepSeek, Tensor]:
    """Return the shape of DeepSeek-V3, and a batch of one sequence."""
    shape = Shape(
        width=7168,
        layers=61,
        dense_layers=3,
        heads=128,
        head_size=128,
        rotary_size=64,
        query_rank=1536,
        key_rank=512,
        hidden=18432,
        experts=256,
        choices=8,
        expert_hidden=2048,
        vocabulary=129280,
    )
    return DeepSeek(shape), torch.zeros(1, SEQUENCE, dtype=torch.long)
