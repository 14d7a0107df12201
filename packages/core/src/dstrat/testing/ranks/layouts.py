"""Trainings of a layout in a rank, with a module that every kind of parallelism can divide."""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset
from typing_extensions import override

from dstrat.interfaces.pipeline import Pipeline
from dstrat.parallel.shards import local_tensor
from dstrat.testing.ranks.fits import Fit, make_trainer, numbers
from dstrat.training.callbacks.callback import Callback
from dstrat.training.module.train_module import TrainModule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.testing.ranks.jobs import Subject
    from dstrat.testing.ranks.team import RankContext

GLOBAL_BATCH, BATCHES = 8, 6  # of an epoch
STEPS, SAVED_AT = 5, 2  # of two batches each: the checkpoint is in the middle of the first epoch
_LENGTH, _TOKENS, _WIDTH, _HEADS, _KEY_HEADS = 16, 11, 16, 4, 2
_EXPERTS, _HIDDEN = 4, 2
_IGNORED = -100
_CLIP = 0.1  # below the norms of all steps, which are from 0.2 on
_DECAY = 0.8  # of the learning rate, in each optimizer step
_SEED = 100


class Embedding(nn.Module):
    """Embedding of tokens and positions, the last dimension of its input; its factor grows with the batches."""

    scale: Tensor
    batches: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(_TOKENS, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
        self.register_buffer("scale", torch.rand(_WIDTH) + 0.5)  # of the first rank, as the parameters
        self.register_buffer("batches", torch.zeros(()))  # counted by the module, as forward passes see microbatches

    def forward(self, pair: Tensor) -> Tensor:
        factor = self.scale * (1 + self.batches / BATCHES)
        embedded: Tensor = (self.tokens(pair[..., 0]) + self.positions(pair[..., 1])) * factor
        return embedded


class Attention(nn.Module):
    """Causal attention, of whose key heads each serves two of queries; with a part of the heads where it is split."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(_WIDTH, _WIDTH)
        self.key, self.value = (nn.Linear(_WIDTH, _WIDTH * _KEY_HEADS // _HEADS) for _ in range(2))
        self.out = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = (
            layer(x).unflatten(-1, (-1, _WIDTH // _HEADS)).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        attended = functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        added: Tensor = x + self.out(attended.transpose(1, 2).flatten(2))
        return added


class Experts(nn.Module):
    """Experts that are called with tokens, each token's experts, and the factors of their outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(_EXPERTS, _WIDTH, _HIDDEN) / 4)
        self.down = nn.Parameter(torch.randn(_EXPERTS, _HIDDEN, _WIDTH) / 4)

    def forward(self, tokens: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        output = torch.zeros_like(tokens)
        for expert, (up, down) in enumerate(zip(self.up, self.down, strict=True)):
            rows, choices = torch.where(index == expert)
            computed = torch.tanh(tokens[rows] @ up) @ down
            output = output.index_add(0, rows, computed * weights[rows, choices, None])
        return output


class Mixture(nn.Module):
    """Two experts for each token, as a router chooses them."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(_WIDTH, _EXPERTS)
        self.experts = Experts()

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, index = self.router(tokens).softmax(-1).topk(2)
        mixed: Tensor = x + self.experts(tokens, index, weights).view_as(x)
        return mixed


class Head(nn.Linear):
    """Linear layer, whose output depends on the least and the greatest of its largest weights in training.

    Forward passes change this buffer, to the same values for any part of a batch.
    """

    bounds: Tensor

    def __init__(self) -> None:
        super().__init__(_WIDTH, _TOKENS)
        self.register_buffer("bounds", torch.tensor([1.0, 0.0]))

    @override
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            largest, (least, greatest) = self.weight.detach().abs().max(), self.bounds
            self.bounds.copy_(torch.stack([torch.minimum(least, largest), torch.maximum(greatest, largest)]))
        return super().forward(x) / (0.5 + self.bounds.sum())


class LayoutNet(TrainModule):
    """A small language model; its loss is a mean over labels, of which each sequence has another number.

    Its layers are ``net``, an ``nn.Sequential`` with layers of attention (``query``, ``key``, ``value``, ``out``), and
    experts between them.

    Args:
        configure: What it does in its ``configure_model``.
        seed: Seed of its first values.
    """

    def __init__(self, configure: Callable[[TrainModule], None] | None, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self._configure = configure
        self.net = nn.Sequential(Embedding(), Attention(), Mixture(), Attention(), nn.Tanh(), Head())
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.validated: list[float] = []

    def configure_model(self) -> None:
        if self._configure is not None:
            self._configure(self)

    def configure_pipeline(self) -> Pipeline:
        return Pipeline(model=self.net, inputs=_inputs, loss=_loss, weight=_count)

    @override
    def configure_experts(self) -> list[nn.Module]:
        mixture: Any = self.net[2]
        return [mixture.experts]

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": _loss(self.net(_inputs(batch)), batch), "weight": _count(batch)}

    @override
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("loss", _loss(self.net(_inputs(batch)), batch), batch_size=float(_count(batch)))

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        embedding: Any = self.net[0]
        embedding.batches += 1

    @override
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        reduce, weight = self.trainer.strategy.reduce, outputs["weight"].float()
        # The loss is that of a batch before it is divided by the number of accumulated ones, or after it.
        self.losses.append(float(reduce(outputs["loss"].detach() * weight) / reduce(weight)))

    def on_validation_epoch_end(self) -> None:
        self.validated.append(float(self.trainer.callback_metrics["loss"]))

    @override
    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None, gradient_clip_algorithm: ClipAlgorithm
    ) -> None:
        strategy = self.trainer.strategy
        norm = None
        if strategy.replicates_state:
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
        assert gradient_clip_val is not None  # noqa: S101 - the trainings clip
        returned = strategy.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)
        norm = norm if returned is None else returned
        if norm is not None:
            self.norms.append(float(norm))

    def configure_optimizers(self) -> Any:
        # Unlike Adam's, its steps grow with the gradients: losses show wrong factors, and a wrong norm in clipping.
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0, momentum=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _DECAY**step)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def train_dataloader(self) -> DataLoader[Any]:
        return self._loader(GLOBAL_BATCH * BATCHES)

    def val_dataloader(self) -> DataLoader[Any]:
        return self._loader(GLOBAL_BATCH)

    def _loader(self, size: int) -> DataLoader[Any]:
        readers = self.trainer.strategy.distributed_sampler_kwargs.get("num_replicas", 1)
        return DataLoader(_data(size), batch_size=GLOBAL_BATCH // readers)


def _data(size: int) -> TensorDataset:
    tokens = torch.randint(_TOKENS, (size, _LENGTH + 1), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(_LENGTH).expand(size, -1)
    num_labels = 3 + 5 * torch.arange(size)[:, None] % (_LENGTH - 3)
    return TensorDataset(tokens[:, :-1], positions, tokens[:, 1:].where(positions < num_labels, _IGNORED))


def _inputs(batch: Any) -> Tensor:
    return torch.stack(batch[:2], -1)


def _count(batch: Any) -> Tensor:
    labels: Tensor = batch[2]
    return (labels != _IGNORED).sum()


def _loss(logits: Tensor, batch: Any) -> Tensor:
    total = functional.cross_entropy(logits.flatten(0, 1), batch[2].flatten(), reduction="sum")
    loss: Tensor = total / _count(batch).clamp(min=1)  # a part of the sequences may have no labels
    return loss


@dataclass(kw_only=True)
class LayoutRecord(Callback):
    """What a training of a layout leaves in a rank.

    Attributes:
        save_to: Where a checkpoint is saved.
        losses: The loss of each batch over all ranks.
        validated: The loss of each validation.
        norms: The norm of the gradients of each optimizer step before clipping, over all ranks; empty where the
            strategy divides gradients and does not return it.
        buffers: The buffers at the end, by name.
        numel: Number of elements of the parameters that the rank holds, at the end.
        drawn: A random number after a step that has begun with a seed of the rank.
    """

    save_to: str | None = None
    losses: list[float] = field(default_factory=list)
    validated: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    buffers: dict[str, list[float]] = field(default_factory=dict)
    numel: int = 0
    drawn: float = 0.0

    @override
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(_SEED + trainer.global_rank)

    @override
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.drawn = float(torch.rand(()))
        if self.save_to is not None and trainer.global_step == SAVED_AT and batch_idx % 2:
            trainer.save_checkpoint(self.save_to)
            self.save_to = None

    def on_train_end(self, trainer: Any, module: Any) -> None:
        weights = trainer.strategy.local_weights()
        parameters = {name for name, _ in module.named_parameters()}
        self.numel = sum(local_tensor(value).numel() for name, value in weights.items() if name in parameters)
        self.buffers = {name: numbers(value) for name, value in weights.items() if name not in parameters}


def expected_draw(rank: int) -> float:
    """Return the first random number of a rank after it was seeded, when nothing else draws."""
    return float(torch.rand((), generator=torch.Generator().manual_seed(_SEED + rank)))


def train_layouts(rank_context: RankContext, subject: Subject, ways: Sequence[Mapping[str, Any]]) -> list[LayoutRecord]:
    """Train once for each way.

    Args:
        rank_context: This rank.
        subject: The strategy.
        ways: The trainings: ``save_to`` and ``resume_from`` are paths of checkpoints, ``stop_at`` is a number of
            optimizer steps.
    """
    return [_train(rank_context, subject, **way) for way in ways]


def _train(
    rank_context: RankContext,
    subject: Subject,
    save_to: str | None = None,
    resume_from: str | None = None,
    stop_at: int = STEPS,
) -> LayoutRecord:
    if save_to is not None and rank_context.rank == 0:
        shutil.rmtree(save_to, ignore_errors=True)  # of a job that was too slow, after which this one runs
    record, net = LayoutRecord(save_to=save_to), LayoutNet(subject.configure_model, seed=rank_context.rank)
    work = Fit(epochs=2, stop_at=stop_at, accumulate=2, clip=_CLIP, validate_every=BATCHES)
    make_trainer(rank_context, subject, work, [record]).fit(net, ckpt_path=resume_from)
    record.losses, record.validated, record.norms = net.losses, net.validated, net.norms
    return record
