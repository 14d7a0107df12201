"""One rank that trains small language models with a layout, for layouts.py."""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, Subset

import dstrat
from dstrat import Callback, Trainer
from dstrat.errors import DstratError
from dstrat.testing.ranks.layouts import Attention, Embedding, LayoutNet, Mixture

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dstrat import Pipeline, TrainModule
    from dstrat.testing.ranks.team import RankContext

STEPS, BATCH, LENGTH, TOKENS = 20, 8, 16, 11
_IGNORED = -100
_CLIPPED = {"nn.Sequential": 0.42}
"""Near the median of the norms of gradients, as of the other models 1 is: half of the steps are clipped, so that losses
show both norms and the factors of gradients."""
_QUIET = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Training:
    """A training of 20 steps.

    Attributes:
        model: One of :data:`MODELS`.
        options: Constructor arguments of ``MeshStrategy``; None for one device.
        precision: Flag of the precision.
        order: Number of the order of the samples in each batch, of which each rounds other sums.
    """

    model: str
    options: Mapping[str, Any] | None = field(default=None)
    precision: str = "32-true"
    order: int = 0


def losses_of(rank_context: RankContext, training: Training) -> list[float] | str:
    """Train; return the loss of each step over all ranks, or the sentence with which the layout is refused."""
    warnings.simplefilter("ignore")  # of transformers
    dstrat.seed_everything(7, verbose=False)
    record = _Losses()
    try:
        module = MODELS[training.model]()
        trainer = _trainer(rank_context, training, record)
        trainer.fit(module, _loader(training, trainer))
    except DstratError as error:
        return str(error)
    return record.losses


def _trainer(rank_context: RankContext, training: Training, record: _Losses) -> Trainer:
    strategy: Any = "single_device"
    plugins: list[Any] = []
    if training.options is not None:
        from dstrat_mesh import MeshStrategy

        strategy, plugins = MeshStrategy(**training.options), [rank_context.cluster]
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=rank_context.world_size,
        plugins=plugins,
        precision=training.precision,
        max_epochs=1,
        gradient_clip_val=_CLIPPED.get(training.model, 1.0),
        callbacks=[record],
        default_root_dir=rank_context.folder,
        **_QUIET,
    )


class _Losses(Callback):
    """Records the loss of each step over all ranks."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - the hook's
        """Take the mean over all labels."""
        reduce, weight = trainer.strategy.reduce, outputs["weight"].double()
        self.losses.append(float(reduce(outputs["loss"].detach().double() * weight) / reduce(weight)))


# The data


def _loader(training: Training, trainer: Trainer) -> DataLoader[Any]:
    """Return the batches of a reader: in all layouts those of a step have the same samples."""
    names_arguments = training.model in TRANSFORMERS
    samples: Any = [_sample(index, names_arguments=names_arguments) for index in range(STEPS * BATCH)]
    shuffled = torch.randperm(BATCH, generator=torch.Generator().manual_seed(training.order)).tolist()
    if training.order:
        samples = Subset(samples, [start + index for start in range(0, len(samples), BATCH) for index in shuffled])
    sampled = {} if training.options is None else trainer.strategy.distributed_sampler_kwargs
    readers = sampled.get("num_replicas", 1)
    return DataLoader(samples, batch_size=BATCH // readers)


def _sample(index: int, *, names_arguments: bool) -> Any:
    """Return tokens and labels, of which each sample has another number."""
    tokens = torch.randint(TOKENS, (LENGTH + 1,), generator=torch.Generator().manual_seed(index))
    positions, num_labels = torch.arange(LENGTH), 3 + 5 * index % (LENGTH - 3)
    if names_arguments:  # each token has itself as its label, and a model shifts them
        return {"input_ids": tokens[:-1], "labels": tokens[:-1].where(positions < num_labels, _IGNORED)}
    return tokens[:-1], positions, tokens[1:].where(positions < num_labels, _IGNORED)


# The models


def _split_heads(module: Any) -> None:
    """Split the layers of attention over the ranks of ``tp``."""
    strategy = module.trainer.strategy
    if getattr(strategy, "tensor_parallel_size", 1) == 1:
        return
    plan = {**dict.fromkeys(("query", "key", "value"), ColwiseParallel()), "out": RowwiseParallel()}
    for layer in module.modules():
        if isinstance(layer, Attention):
            parallelize_module(layer, strategy.device_mesh["tp"], plan)


class _Sequential(LayoutNet):
    """An ``nn.Sequential`` with attention and experts."""

    def __init__(self) -> None:
        super().__init__(_split_heads, seed=1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Leave the factor of the embedding, which grows with each batch in the suite: 20 would amplify rounding."""

    def configure_optimizers(self) -> Any:
        return _sgd(self.parameters(), lr=0.5)


class _OwnLayers(nn.Module):
    """A model with a ``forward`` of its own, whose embedding and output layer share their weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = Embedding()
        width = self.embedding.tokens.embedding_dim
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), Attention(), Mixture(), nn.Tanh()) for _ in range(3)
        )
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, TOKENS, bias=False)
        self.head.weight = self.embedding.tokens.weight

    def forward(self, pair: Tensor) -> Tensor:
        x = self.embedding(pair)
        for block in self.blocks:
            x = x + block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class _Own(_Sequential):
    """The module with a model of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net: Any = _OwnLayers()  # type: ignore[assignment]  # with the same input and output

    def configure_pipeline(self) -> Pipeline:
        """Return the layers in order, of which blocks are called with what they are added to."""
        net = self.net

        def compute(stage: Any, value: Any, _batch: Any) -> Any:
            for layer in stage:
                value = value + layer(value) if layer in set(net.blocks) else layer(value)
            return value

        layers = [net.embedding, *net.blocks, net.norm, net.head]
        return dataclasses.replace(super().configure_pipeline(), model=net, layers=layers, compute=compute)

    def configure_experts(self) -> list[nn.Module]:
        """Return the experts of each block."""
        return [layer.experts for layer in self.net.modules() if isinstance(layer, Mixture)]


def _sgd(parameters: Any, lr: float, **_: Any) -> torch.optim.Optimizer:
    """Return an optimizer whose steps grow with the gradients, so that losses show wrong factors and norms."""
    return torch.optim.SGD(parameters, lr=lr, momentum=0.5)


_SIZES: dict[str, Any] = {
    "vocab_size": TOKENS,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": LENGTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("Llama", {"tie_word_embeddings": True}),
    "Qwen3": ("Qwen3", {"head_dim": 8}),
    "Gemma 2": ("Gemma2", {"head_dim": 8, "sliding_window": 4, "attn_implementation": "eager"}),
    "Mixtral": ("Mixtral", {"num_local_experts": 4}),
}
"""Names of families in transformers, and further options of their configs."""


def _of_transformers(name: str) -> TrainModule:
    import transformers

    from dstrat_transformers import HFModule

    family, options = TRANSFORMERS[name]
    config = getattr(transformers, f"{family}Config")(**_SIZES, **options)
    model = partial(getattr(transformers, f"{family}ForCausalLM"), config)
    return HFModule(model, optimizer=_sgd, scheduler=None, learning_rate=0.1)


MODELS: dict[str, Callable[[], TrainModule]] = {
    "nn.Sequential": _Sequential,
    "own module": _Own,
    **{name: partial(_of_transformers, name) for name in TRANSFORMERS},
}
