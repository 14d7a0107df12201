r"""Llama 3 in plain torch, for `dstrat choose` and `dstrat explain`: shapes of 8, 70 and 405 billion parameters.

    dstrat explain --model examples/layouts/llama.py:llama_70b --strategy "mesh(pp=8, tp=8)" --devices 512 --nodes 64 \
        --batch 64
    dstrat choose examples/layouts/llama.py:llama_8b --devices 16 --machine h100x8

The functions return a module and a batch of one sequence.  Nothing of the module is allocated there.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F  # noqa: N812 - as everyone writes it

from dstrat import Pipeline, TrainModule

SEQUENCE = 8192
VOCABULARY = 128256


class Block(nn.Module):
    """Attention whose keys and values have fewer heads than queries, and a gated feed-forward layer."""

    def __init__(self, width: int, heads: int, key_heads: int, hidden: int) -> None:
        super().__init__()
        self.head_size = width // heads
        keys = key_heads * self.head_size
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(width), nn.RMSNorm(width)
        self.queries, self.keys = nn.Linear(width, width, bias=False), nn.Linear(width, keys, bias=False)
        self.values, self.output = nn.Linear(width, keys, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return x of the same shape, with what this block adds."""
        normed = self.attention_norm(x)
        queries, keys, values = (
            layer(normed).unflatten(-1, (-1, self.head_size)).transpose(1, 2)
            for layer in (self.queries, self.keys, self.values)
        )
        attended = F.scaled_dot_product_attention(
            rotated(queries), rotated(keys), values, is_causal=True, enable_gqa=True
        )
        x = x + self.output(attended.transpose(1, 2).flatten(2))
        normed = self.feed_forward_norm(x)
        out: Tensor = x + self.down(F.silu(self.gate(normed)) * self.up(normed))
        return out

    def split(self, mesh: torch.distributed.device_mesh.DeviceMesh) -> None:
        """Split the matrices over the ranks of a mesh, by columns and rows in turn."""
        columns = dict.fromkeys(("queries", "keys", "values", "gate", "up"), ColwiseParallel())
        parallelize_module(self, mesh, {**columns, "output": RowwiseParallel(), "down": RowwiseParallel()})


def rotated(heads: Tensor) -> Tensor:
    """Return queries or keys of shape (batch, heads, sequence, size), turned by angles of their positions."""
    half = heads.shape[-1] // 2
    positions = torch.arange(heads.shape[-2], device=heads.device, dtype=torch.float32)
    frequencies = 500000.0 ** (-torch.arange(half, device=heads.device, dtype=torch.float32) / half)
    angles = positions[:, None] * frequencies
    cosines, sines = angles.cos().to(heads.dtype), angles.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat((first * cosines - second * sines, first * sines + second * cosines), dim=-1)


class Llama(TrainModule):
    """A decoder, which predicts each token from those before it.

    Args:
        width: Number of features.
        layers: Number of blocks.
        heads: Number of heads of queries.
        key_heads: Number of heads of keys and values.
        hidden: Number of features between the feed-forward layers.
        vocabulary: Number of tokens.
    """

    def __init__(
        self, width: int, layers: int, heads: int, key_heads: int, hidden: int, vocabulary: int = VOCABULARY
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Block(width, heads, key_heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of each following token."""
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits

    def configure_model(self) -> None:
        """Split blocks over the ranks of ``tp``."""
        mesh = self.device_mesh["tp"]
        for block in self.blocks:
            if mesh.size() > 1:
                block.split(mesh)  # type: ignore[operator]  # a Block

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
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


def loss(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return the mean loss of the tokens after the first one."""
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def sequences() -> Tensor:
    """Return a batch of one sequence."""
    return torch.zeros(1, SEQUENCE, dtype=torch.long)


def llama_8b() -> tuple[Llama, Tensor]:
    """Return the shape of Llama 3 8B."""
    return Llama(4096, 32, 32, 8, 14336), sequences()


def llama_70b() -> tuple[Llama, Tensor]:
    """Return the shape of Llama 3 70B."""
    return Llama(8192, 80, 64, 8, 28672), sequences()


def llama_405b() -> tuple[Llama, Tensor]:
    """Return the shape of Llama 3 405B."""
    return Llama(16384, 126, 128, 8, 53248), sequences()
