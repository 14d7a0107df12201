"""Checks of one subject on a device: each runs by itself, and a failed one costs only itself."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader

import dstrat

if TYPE_CHECKING:
    from collections.abc import Callable

TYPES = {"cuda": "cuda", "simulated_gpu": "simgpu", "cpu": "cpu"}
"""Type of device of each accelerator that the checks run on."""
DEVICES_OF_SIMULATION = "2"

Figure = dict[str, Any]


class NotHereError(Exception):
    """A check that the device at hand cannot run; the text says why."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device that the checks run on.

    Attributes:
        accelerator: Alias of its accelerator.
        type: Its type in torch.
    """

    accelerator: str
    type: str

    @property
    def first(self) -> torch.device:
        """The first device of this type."""
        return torch.device(self.type) if self.type == "cpu" else torch.device(self.type, 0)

    def require(self, *accelerators: str) -> None:
        """Raise NotHereError unless the device is one of these."""
        if self.accelerator not in accelerators:
            raise NotHereError(f"it needs {' or '.join(accelerators)}")

    def trainer(self, **options: Any) -> dstrat.Trainer:
        """Return a Trainer for one device, without output."""
        names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
        quiet = {**dict.fromkeys(names, False), "accelerator": self.accelerator, "devices": 1, "max_epochs": 1}
        return dstrat.Trainer(**(quiet | options))


class Net(dstrat.TrainModule):
    """A small network with dropout; with a fused optimizer a loss scale reads nothing in a step."""

    def __init__(self, *, fused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fused = fused
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 8))

    def loss(self, batch: Any) -> torch.Tensor:
        """Return the mean of the squared outputs."""
        return self.layers(batch["x"]).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002 - the known signature
        """Log the loss and return it."""
        loss = self.loss(batch)
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - likewise
        """Log the loss."""
        self.log("val_loss", self.loss(batch), sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:  # noqa: ARG002 - likewise
        """Return the outputs."""
        outputs: torch.Tensor = self.layers(batch["x"])
        return outputs

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), fused=self.fused)


def make_loader(steps: int = 6, **options: Any) -> DataLoader[Any]:
    """Return a loader of dictionaries, the same ones each time."""
    rows = [{"x": row} for row in torch.randn(16 * steps, 64, generator=torch.Generator().manual_seed(0))]
    return DataLoader(rows, batch_size=16, **options)  # type: ignore[arg-type]  # a list is a dataset too


def figure(name: str, value: float, unit: str, goal: float | None = None, note: str = "") -> Figure:
    """Return a figure for the report; a goal is a largest value."""
    return {"name": name, "value": value, "unit": unit, "goal": goal, "note": note}


def run_checks(*checks: Callable[[Device], str | list[Figure]]) -> None:
    """Run checks on the device of the command line, and write their figures; exit with 1 if one failed.

    A check returns what it has seen, as a text or as figures, or raises.  Its docstring is its name in the report.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda", choices=TYPES)
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    parser.add_argument("--only", help="the function of one check")
    options = parser.parse_args()
    if options.device == "simulated_gpu":
        os.environ.setdefault("DSTRAT_SIMULATED_GPUS", DEVICES_OF_SIMULATION)
        from dstrat.testing import simulated_gpu

        simulated_gpu.load()
    device = Device(accelerator=options.device, type=TYPES[options.device])
    figures: list[Figure] = []
    for check in checks:
        if options.only in (None, check.__name__):
            figures += _run(check, device)
            options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")  # in case the next one hangs
    sys.exit(any(one["unit"] == "failures" and one["value"] for one in figures))


def _run(check: Callable[[Device], str | list[Figure]], device: Device) -> list[Figure]:
    name, started = (check.__doc__ or check.__name__).strip().rstrip("."), time.monotonic()
    failures, seen = 0, []
    try:
        result = check(device)
        note, seen = (result, []) if isinstance(result, str) else ("", result)
    except NotHereError as error:
        note = f"not run: {error}"
    except Exception as error:  # noqa: BLE001 - it is reported
        traceback.print_exc()
        failures, note = 1, f"{type(error).__name__}: {error}".splitlines()[0][:200]
    state = "FAILED" if failures else "passed" if not note.startswith("not run") else "no"
    print(f"{state} {time.monotonic() - started:5.1f} s  {name}: {note}", flush=True)
    for one in seen:
        print(f"  {one['name']}: {one['value']:.4g} {one['unit']} {one['note']}", flush=True)
    return [figure(name, failures, "failures", 0.0, note), *seen]
