"""Train a small transformer of Hugging Face's, whole and with a LoRA adapter of peft, on data of datasets.

Arguments: a strategy, a number of devices, and the file that gets the losses.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import datasets
import dill  # noqa: F401 - which datasets imports where it is needed, and users at the top
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from dstrat import Callback, Trainer, TrainModule, rank_zero_only, seed_everything

DROPOUTS = ("resid_pdrop", "embd_pdrop", "attn_pdrop")


class LanguageModel(TrainModule):
    """Next tokens with GPT-2 in small, as examples of transformers have it: the model returns its own loss."""

    def __init__(self, config: GPT2Config, lora: LoraConfig | None = None) -> None:
        super().__init__()
        self.save_hyperparameters(ignore=["config", "lora"])
        model = GPT2LMHeadModel(config)
        self.model = get_peft_model(model, lora) if lora else model

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        loss = self.model(**batch).loss
        self.log("loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss, batch_size=len(batch["labels"]))

    def configure_optimizers(self) -> dict[str, object]:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        schedule = get_linear_schedule_with_warmup(optimizer, 2, self.trainer.estimated_stepping_batches)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Losses(Callback):
    """The loss of each batch of this process."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.values.append(trainer.callback_metrics["loss"].item())


def rows() -> datasets.Dataset:
    """Return sentences of numbers, tokenized."""
    texts = datasets.Dataset.from_dict({"start": list(range(16))})
    counted = texts.map(lambda row: {"input_ids": [(row["start"] + i) % 31 for i in range(8)]})  # pickled by dill
    return counted.map(lambda row: {"labels": row["input_ids"]}).remove_columns("start").with_format("torch")


def train(lora: LoraConfig | None, strategy: str, devices: int, folder: Path) -> dict[str, object]:
    """Train and validate, and return the losses."""
    seed_everything(1, verbose=False)
    tokens = {"vocab_size": 32, "bos_token_id": 0, "eos_token_id": 0, "loss_type": "ForCausalLM"}
    config = GPT2Config(n_positions=8, n_embd=16, n_layer=2, n_head=2, **tokens, **dict.fromkeys(DROPOUTS, 0.0))
    module, losses = LanguageModel(config, lora), Losses()
    before = {name: p.detach().clone() for name, p in module.named_parameters() if not p.requires_grad}
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        devices=devices,
        max_epochs=2,
        callbacks=losses,
        log_every_n_steps=1,
        default_root_dir=folder,
    )
    data = rows()
    trainer.fit(module, DataLoader(data, batch_size=8 // devices), DataLoader(data, batch_size=4))
    fitted = trainer.callback_metrics["val_loss"].item()
    (validated,) = trainer.validate(module, DataLoader(data, batch_size=4), verbose=False)
    again = LanguageModel.load_from_checkpoint(trainer.checkpoint_callback.best_model_path, config=config, lora=lora)
    kept = all(torch.equal(p, before[name]) for name, p in again.named_parameters() if name in before)
    return {"losses": losses.values, "fitted": fitted, **validated, "frozen": len(before), "kept": kept}


def main(strategy: str, devices: str, file: str) -> None:
    """Train both ways, and write what came of it."""
    datasets.disable_progress_bars()
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True)
    seen = {
        name: train(adapter, strategy, int(devices), Path(file).parent)
        for name, adapter in {"whole": None, "lora": lora}.items()
    }
    rank_zero_only(Path(file).write_text)(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
