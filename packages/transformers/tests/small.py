"""A Llama that a test trains in a second, its data, and runs of it that leave plain values."""

from __future__ import annotations

import json
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

import dstrat
from dstrat import Callback, Trainer
from dstrat_transformers import HFModule, PretrainedCheckpoint

if TYPE_CHECKING:
    from pathlib import Path

GLOBAL_BATCH = 8
SAMPLES = 48
LENGTH = 10
IGNORED = -100


def config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "tie_word_embeddings": True,
    }
    return LlamaConfig(**{**values, **changes})


def llama(**changes: Any) -> LlamaForCausalLM:
    torch.manual_seed(1)
    return LlamaForCausalLM(config(**changes))


def balanced_experts(**changes: Any) -> MixtralForCausalLM:
    """Return a model with a loss of its experts beside that of the labels."""
    torch.manual_seed(1)
    values = {
        name: value
        for name, value in config(**changes).to_dict().items()
        if name not in ("model_type", "architectures")
    }
    return MixtralForCausalLM(MixtralConfig(**values, num_local_experts=2, output_router_logits=True))


def rows(samples: int = SAMPLES, *, padded: bool = True) -> list[dict[str, torch.Tensor]]:
    """Sequences, of which the end does not count: another length in each."""
    made = []
    for index in range(samples):
        tokens = torch.randint(3, 64, (LENGTH,), generator=torch.Generator().manual_seed(index))
        labels = tokens.clone()
        if padded:
            labels[2 + index % (LENGTH - 2) :] = IGNORED
        made.append({"input_ids": tokens, "labels": labels})
    return made


class Losses(Callback):
    """Writes the loss of each step over all processes, its learning rate, and the losses of validations."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.values: dict[str, list[float]] = {"losses": [], "rates": [], "val": []}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy, loss, labels = trainer.strategy, outputs["loss"], outputs["weight"]
        total = strategy.reduce(torch.stack([loss * labels, labels]), reduce_op="mean")
        self.values["losses"].append(float(total[0] / total[1].clamp(min=1e-9)))

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        self.values["rates"].append(trainer.optimizers[0].param_groups[0]["lr"])

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        if not trainer.sanity_checking:
            self.values["val"].append(float(trainer.callback_metrics["val_loss"]))

    def on_train_end(self, trainer: Any, module: Any) -> None:
        if trainer.is_global_zero:
            self.path.write_text(json.dumps(self.values))


def readers(strategy: Any, devices: int) -> int:
    sizes = [getattr(strategy, name, 1) for name in ("_tp", "_pp", "_cp")]
    return devices // math.prod([*sizes, getattr(strategy, "_requested_sizes", (1, 1))[1]])


def train(
    folder: Path,
    strategy: Any = "auto",
    devices: int = 1,
    *,
    model: Any = None,
    data: Any = None,
    validation: Any = None,
    callbacks: Any = (),
    trainer_options: Any = None,
    ckpt_path: Any = None,
    shuffle: bool = False,
    logger: Any = False,
    **options: Any,
) -> dict[str, list[float]]:
    """Train two epochs, and return what Losses has written."""
    dstrat.seed_everything(7, verbose=False)
    folder.mkdir(parents=True, exist_ok=True)
    settings = {"scheduler": "cosine", "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 3, **options}
    module = HFModule(llama() if model is None else model, **settings)
    size = GLOBAL_BATCH // readers(strategy, devices)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=devices,
        default_root_dir=folder,
        logger=logger,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[Losses(folder / "losses.json"), PretrainedCheckpoint(folder / "model"), *callbacks],
        **{"max_epochs": 2, "enable_checkpointing": False, **(trainer_options or {})},
    )
    training = rows() if data is None else data
    loader = training if isinstance(training, DataLoader) else DataLoader(training, batch_size=size, shuffle=shuffle)
    validated = rows(20) if validation is None else validation
    trainer.fit(module, loader, DataLoader(validated, batch_size=size), ckpt_path=ckpt_path)
    return json.loads((folder / "losses.json").read_text())  # type: ignore[no-any-return]


def new_llama(**changes: Any) -> Any:
    """A function that makes a model, as HFModule takes it."""
    return partial(LlamaForCausalLM, config(**changes))
