"""Waits of the host for the device in a step, with their stacks; written as JSON.

``python benchmarks/gpu/waits.py --device cuda --out waits.json``; ``--device simulated_gpu`` needs no GPU, but a C++
compiler.  Steps 5 to 14 of each training are watched.  The vote about stopping, every half second, does not count.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from checks import Net
from torch.utils.data import DataLoader

import dstrat

FIRST, LAST, STEPS = 5, 15, 18
STACK = 6  # lines of a stack, the innermost ones


class Tokens(Mapping[str, Any]):
    """A batch that moves itself, as those of tokenizers do."""

    def __init__(self, values: dict[str, torch.Tensor]) -> None:
        self.values_by_name = values

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Tokens:
        """Return the batch on a device."""
        moved = {name: value.to(device, non_blocking=non_blocking) for name, value in self.items()}
        return Tokens(moved)


class Watch(dstrat.Callback):
    """Collects the waits of some steps."""

    def __init__(self, device: str) -> None:
        self.waits: list[str] = []
        self._device, self._stack = device, contextlib.ExitStack()

    def step(self, index: int) -> None:
        """Begin or end with a step."""
        if index == FIRST:
            self.waits = self._stack.enter_context(waits_of(self._device))
        elif index == LAST:
            self._stack.close()

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - likewise
        """Begin or end with a batch."""
        self.step(batch_idx)


@contextlib.contextmanager
def waits_of(device: str) -> Iterator[list[str]]:
    """Collect the waits for the device, as texts of their stacks."""
    found: list[str] = []
    if device == "simulated_gpu":
        from dstrat.testing.simulated_gpu import synchronizations

        with synchronizations() as waits:
            yield found
        found += [f"{wait.cause}\n{wait.stack}" for wait in waits]
        return
    if device != "cuda":
        yield found
        return

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing" in str(message):
            found.append("".join(traceback.format_stack(sys._getframe(1))))  # noqa: SLF001 - without this function

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield found
        finally:
            torch.cuda.set_sync_debug_mode("default")


def loader(*, pins: bool, moves_itself: bool) -> DataLoader[Any]:
    """Return batches on the host."""
    kind = Tokens if moves_itself else dict

    def collate(rows: list[torch.Tensor]) -> Any:
        return kind({"x": torch.stack(rows)})

    return DataLoader(torch.randn(16 * STEPS, 64), batch_size=16, collate_fn=collate, pin_memory=pins)


def with_trainer(device: str, precision: str, batches: DataLoader[Any]) -> list[str]:
    """Train with a Trainer; return the waits."""
    watch = Watch(device)
    trainer = dstrat.Trainer(
        accelerator=device,
        devices=1,
        precision=precision,
        callbacks=[watch],
        max_epochs=1,
        log_every_n_steps=1000,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Net(fused=precision == "16-mixed"), batches)
    return watch.waits


def with_own_loop(device: str, precision: str, batches: DataLoader[Any]) -> list[str]:
    """Train with an OwnLoop, which logs nothing; return the waits."""
    watch = Watch(device)

    def train(loop: Any) -> None:
        net = Net(fused=precision == "16-mixed")
        loop.setup(net, lambda net: net.configure_optimizers())
        for index, batch in enumerate(loop.training_loader(batches)):
            watch.step(index)
            loop.backward(loop.compute(net.loss, batch))
            loop.step()

    dstrat.OwnLoop(dstrat.build(accelerator=device, devices=1, precision=precision)).launch(train)
    return watch.waits


def main() -> None:
    """Watch each combination, print the waits per step, and write them with the stacks."""
    parser = argparse.ArgumentParser(description="Count the waits of the host for the device in a step.")
    parser.add_argument("--device", default="cuda", choices=("cpu", "cuda", "simulated_gpu"))
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    options = parser.parse_args()
    if options.device == "simulated_gpu":
        os.environ.setdefault("DSTRAT_SIMULATED_GPUS", "1")
    precisions = ("32-true", "bf16-mixed") if options.device == "cpu" else ("32-true", "bf16-mixed", "16-mixed")
    figures = []
    for way, precision, pins, moves_itself in itertools.product(
        (with_trainer, with_own_loop), precisions, (True, False), (False, True)
    ):
        batches = loader(pins=pins and options.device == "cuda", moves_itself=moves_itself)
        waits = [wait for wait in way(options.device, precision, batches) if "stopping.py" not in wait]
        arm = "Trainer" if way is with_trainer else "OwnLoop"
        name = f"{arm}, {precision}, {'pinned' if pins else 'pageable'} {'objects' if moves_itself else 'dicts'}"
        stacks = Counter("\n".join(wait.strip().splitlines()[-STACK:]) for wait in waits)
        shown = "; ".join(f"{count} x {stack.splitlines()[-1].strip()}" for stack, count in stacks.most_common(3))
        value = len(waits) / (LAST - FIRST)
        found = {"name": f"{name}: waits in a step", "value": value, "unit": "", "goal": 0.0, "note": shown}
        figures.append({**found, "stacks": [stack for stack, _ in stacks.most_common(3)]})
        print(f"{name}: {value:g} waits in a step", flush=True)
        for stack, count in stacks.most_common(3):
            print(f"  {count} x\n{stack}", flush=True)
    options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
