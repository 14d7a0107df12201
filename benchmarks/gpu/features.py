"""Options of one rank on a device: activation memory, matrix optimizers, and transformers' Trainer."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from checks import Device, Figure, NotHereError, figure, run_checks
from gpt import GPT, Shape
from torch.utils.data import DataLoader
from typing_extensions import override

import dstrat

SHAPE = Shape(layers=6, width=512, heads=8, vocabulary=4096, context=512, batch_size=16)
SMALL = Shape(layers=2, width=32, heads=2, vocabulary=64, context=16, batch_size=2)
STEPS = 4
SECONDS = 120  # of a program
WAYS = {
    "everything": "ddp",
    "selective": "ddp(activation_checkpointing='selective')",
    "full": "ddp(activation_checkpointing='full')",
    "offload": "ddp(activation_offload=True)",
}

TRANSFORMERS = """
import json, sys
from pathlib import Path
strategy, out = sys.argv[1:]
if strategy != "none":
    import dstrat_transformers
    dstrat_transformers.use(strategy, accelerator={accelerator!r}, devices=1)
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed
set_seed(0)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
config = LlamaConfig(vocab_size=128, pad_token_id=0, bos_token_id=0, eos_token_id=0, **sizes)
rows = torch.randint(128, (64, 32), generator=torch.Generator().manual_seed(0))
data = [dict(input_ids=row, labels=row) for row in rows]
arguments = TrainingArguments(
    output_dir=out + "-run", max_steps=6, per_device_train_batch_size=8, logging_steps=1, report_to=[], bf16={bf16},
    save_strategy="no", disable_tqdm=True, use_cpu={use_cpu},
)
trainer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data)
trainer.train()
Path(out).write_text(json.dumps([row["loss"] for row in trainer.state.log_history if "loss" in row]))
"""


class _Language(dstrat.TrainModule):
    """A GPT that records its losses."""

    def __init__(self, shape: Shape, *, muon: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gpt = GPT(shape)
        self.muon = muon
        self.losses: list[torch.Tensor] = []

    @override
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss: torch.Tensor = self.gpt(batch)
        self.losses.append(loss.detach())
        return loss

    @override
    def configure_optimizers(self) -> Any:
        if self.muon:
            return dstrat.Muon.of_module(self, adamw_layers=["gpt.tokens", "gpt.positions"], lr=0.02)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _losses(device: Device, shape: Shape, strategy: str, *, muon: bool = False, **options: Any) -> list[float]:
    """Train for some steps; return the losses."""
    net = _Language(shape, muon=muon)
    size = (STEPS * shape.batch_size, shape.context + 1)
    tokens = torch.randint(shape.vocabulary, size, generator=torch.Generator().manual_seed(0))
    device.trainer(strategy=strategy, **options).fit(net, DataLoader(tokens, batch_size=shape.batch_size))  # type: ignore[arg-type]  # a tensor is a dataset
    return [float(loss) for loss in net.losses]


def _shape(device: Device) -> Shape:
    return SHAPE if device.type == "cuda" else SMALL


def activation_memory(device: Device) -> list[Figure]:
    """Recomputed and offloaded activations give the same losses, and take less memory."""
    device.require("cuda", "cpu")
    losses, peaks = {}, {}
    for name, strategy in WAYS.items():
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        losses[name] = _losses(device, _shape(device), strategy, precision="bf16-mixed")
        peaks[name] = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    figures = []
    for name, values in losses.items():
        apart = max(abs(a / b - 1) for a, b in zip(values, losses["everything"], strict=True))
        note = f"{peaks[name] / 2**20:.0f} MiB"
        # Atomic additions of the backward pass of an embedding round differently in each run.
        figures.append(figure(f"activations, {name}: difference of losses", apart, "", 1e-4, note))
        if peaks[name]:
            share = peaks[name] / peaks["everything"]
            figures.append(figure(f"activations, {name}: peak memory over everything", share, "x", 1.001))
    return figures


def muon(device: Device) -> list[Figure]:
    """dstrat.Muon has the losses on the device that it has on the CPU."""
    host = Device(accelerator="cpu", type="cpu")
    shape = Shape(layers=2, width=128, heads=4, vocabulary=256, context=64, batch_size=8)
    expected = _losses(host, shape, "single_device", muon=True)
    figures = []
    for strategy in ("single_device", "ddp", "fsdp"):
        losses = _losses(device, shape, strategy, muon=True)
        apart = max(abs(a / b - 1) for a, b in zip(losses, expected, strict=True))
        figures.append(figure(f"Muon, {strategy}: difference of losses to the CPU's", apart, "", 1e-2))
    return figures


def transformers_trainer(device: Device) -> list[Figure]:
    """Our strategies in transformers' Trainer have the losses of its own."""
    device.require("cuda", "cpu")
    if not importlib.util.find_spec("transformers"):
        raise NotHereError("it needs transformers")
    on_cpu = device.type == "cpu"
    code = TRANSFORMERS.format(accelerator="cpu" if on_cpu else "gpu", bf16=not on_cpu, use_cpu=on_cpu)
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "program.py"
        program.write_text(code, encoding="utf-8")
        for strategy in ("none", "ddp", "fsdp"):
            out = Path(folder) / f"{strategy}.json"
            command = [sys.executable, str(program), strategy, str(out)]
            environ = {**os.environ, "CUDA_VISIBLE_DEVICES": "" if on_cpu else "0"}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=SECONDS, check=False, env=environ, cwd=folder
            )
            assert done.returncode == 0, done.stderr[-3000:]
            losses[strategy] = json.loads(out.read_text(encoding="utf-8"))
    return [
        figure(
            f"transformers' Trainer, {strategy}: difference of losses",
            max(abs(a / b - 1) for a, b in zip(losses[strategy], losses["none"], strict=True)),
            "",
            1e-2,
            f"last {losses[strategy][-1]:.4f}",
        )
        for strategy in ("ddp", "fsdp")
    ]


if __name__ == "__main__":
    run_checks(activation_memory, muon, transformers_trainer)
