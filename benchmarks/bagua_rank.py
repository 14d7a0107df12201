"""One rank that trains the demo GPT, and measures its speed, the bytes that its interface sends, and the loss."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "gpt"))
from data import StandardLibrary
from model import GPT, Shape

from dstrat import Callback, Trainer
from dstrat_bagua import BaguaStrategy, QAdamOptimizer

_FIRST = 8
"""Steps before the measurement; those of the warm-up of QAdam where the link is slow are among them."""
_OPTIONS = {"async": {"warmup_steps": 0, "sync_interval_ms": 500}}


class QAdamGPT(GPT):
    """The demo GPT with the optimizer of qadam, without weight decay as in Bagua."""

    def configure_optimizers(self) -> dict[str, Any]:
        configured = super().configure_optimizers()
        warmup = max(_FIRST - 3, self.steps // 5)
        optimizer = QAdamOptimizer(self.parameters(), lr=self.learning_rate, betas=(0.9, 0.99), warmup_steps=warmup)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, self._rate)
        return {**configured, "optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Measurement(Callback):
    """Time and sent bytes from one step to the last."""

    def __init__(self, last: int) -> None:
        self._last, self.seconds, self.sent = last, 0.0, 0

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - the arguments of the hook
        """Take note of the first and the last step."""
        sign = {_FIRST: -1, self._last: 1}.get(batch_idx + 1, 0)
        self.seconds += sign * time.perf_counter()
        self.sent += sign * sent_bytes()


def sent_bytes() -> int:
    """Return how many bytes the interface has sent."""
    [line] = [line for line in Path("/proc/net/dev").read_text().splitlines() if line.strip().startswith("bagua0:")]
    return int(line.split(":")[1].split()[8])


def main() -> None:
    """Train, and let rank 0 write what it has measured."""
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("steps", type=int)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    strategy = "ddp" if options.name == "ddp" else BaguaStrategy(options.name, **_OPTIONS.get(options.name, {}))
    measurement = Measurement(options.steps)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=1,
        num_nodes=2,
        max_steps=options.steps,
        val_check_interval=options.steps,
        limit_val_batches=16,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        callbacks=[measurement],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    shape = Shape()
    model = (QAdamGPT if options.name == "qadam" else GPT)(shape, learning_rate=1.5e-3, steps=options.steps)
    trainer.fit(model, datamodule=StandardLibrary(context=shape.context, batch_size=8))
    if trainer.is_global_zero:
        steps = options.steps - _FIRST
        parameters = sum(parameter.numel() for parameter in model.parameters())
        result = {
            "loss": float(trainer.callback_metrics["val_loss"]),
            "steps/s": steps / measurement.seconds,
            "bytes": measurement.sent / steps / parameters,
        }
        options.out.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
