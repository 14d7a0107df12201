"""Measurements of one training on one device: step times, memory, checkpoints, estimates; written as JSON.

``python benchmarks/gpu/measure.py gpt --device cuda --out gpt.json``; ``--tiny`` makes everything small.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib.util
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpt import GPT_124M, TINY_GPT, make_dataset, make_module, make_optimizer
from torch.utils.data import DataLoader

import dstrat

if TYPE_CHECKING:
    from collections.abc import Callable

PRECISION = "bf16-mixed"
GOALS = {"step time": 1.005, "peak memory": 1.01, "estimate": 0.1}


class Clock:
    """Takes the time of the steps after the warm-up, and the device's largest memory in them.

    Args:
        device: The device.
        warmup: Steps before the time starts.
        last: Index of the step at whose beginning it ends.
    """

    def __init__(self, device: torch.device, warmup: int, last: int) -> None:
        self._device, self._warmup, self._last = device, warmup, last
        self._step = 0
        self.seconds = 0.0
        self.peak = 0

    def tick(self) -> None:
        """Count the beginning of a step."""
        if self._step == self._warmup:
            self._synchronize()
            if self._device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self._device)
            self.seconds = -time.perf_counter()
        elif self._step == self._last:
            self._synchronize()
            self.seconds += time.perf_counter()
            if self._device.type == "cuda":
                self.peak = torch.cuda.max_memory_allocated(self._device)
        self._step += 1

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


class Task:
    """One training, the same for every arm.

    Args:
        options: Of the command line.
        compiles: Whether the module is compiled.
    """

    def __init__(self, options: argparse.Namespace, *, compiles: bool) -> None:
        self.name, self.tiny = options.name, options.tiny
        self.device = torch.device(options.device, 0) if options.device == "cuda" else torch.device("cpu")
        self.warmup, self.steps = (1, 2) if options.tiny else (20, 1000) if self.name == "mlp" else (5, 30)
        self.compiles = compiles

    def module(self) -> Any:
        """Return the module, with the same weights each time."""
        module = make_module(self.name, tiny=self.tiny)
        if self.compiles:
            module.compile()
        return module

    def loader(self) -> DataLoader[Any]:
        """Return the loader; one step more than is timed, at whose beginning the time ends."""
        dataset, batch_size = make_dataset(self.name, self.warmup + self.steps + 1, tiny=self.tiny)
        return DataLoader(dataset, batch_size=batch_size, pin_memory=self.device.type == "cuda")

    def clock(self) -> Clock:
        """Return a new clock."""
        return Clock(self.device, self.warmup, self.warmup + self.steps)


# Arms


def by_hand(task: Task, clock: Clock) -> None:
    """Train as one writes it with torch alone."""
    module = task.module().to(task.device)
    optimizer = make_optimizer(module)
    for (batch,) in task.loader():
        clock.tick()
        x = batch.to(task.device, non_blocking=True)
        with torch.autocast(task.device.type, dtype=torch.bfloat16):
            loss = module(x)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()


def _train_module(base: Any, task: Task, clock: Clock) -> Any:
    class Module(base):  # type: ignore[misc]  # of dstrat or of Lightning
        def __init__(self) -> None:
            super().__init__()
            self.network = task.module()

        def training_step(self, batch: Any, batch_idx: int) -> Any:  # noqa: ARG002 - not needed
            clock.tick()
            return self.network(batch[0])

        def configure_optimizers(self) -> Any:
            return make_optimizer(self)

    return Module()


def _quiet(task: Task) -> dict[str, Any]:
    names = ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing")
    accelerator = "gpu" if task.device.type == "cuda" else "cpu"
    return {
        **dict.fromkeys(names, False),
        "accelerator": accelerator,
        "devices": 1,
        "precision": PRECISION,
        "max_epochs": 1,
    }


def with_trainer(task: Task, clock: Clock) -> None:
    """Train with dstrat's Trainer."""
    trainer = dstrat.Trainer(strategy="single_device", **_quiet(task))
    trainer.fit(_train_module(dstrat.TrainModule, task, clock), task.loader())


def with_own_loop(task: Task, clock: Clock) -> None:
    """Train with dstrat's OwnLoop."""

    def train(loop: dstrat.OwnLoop) -> None:
        module = task.module()
        loop.setup(module, make_optimizer)
        for (batch,) in loop.training_loader(task.loader()):
            clock.tick()
            loss = loop.compute(module, batch)
            loop.backward(loss)
            loop.step()

    strategy = dstrat.build(strategy="single_device", accelerator=_quiet(task)["accelerator"], precision=PRECISION)
    dstrat.OwnLoop(strategy).launch(train)


def with_lightning(task: Task, clock: Clock) -> None:
    """Train with Lightning's Trainer."""
    import lightning

    trainer = lightning.Trainer(**_quiet(task))
    trainer.fit(_train_module(lightning.LightningModule, task, clock), task.loader())


def with_accelerate(task: Task, clock: Clock) -> None:
    """Train with Accelerate."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", cpu=task.device.type == "cpu")
    module = task.module()
    module, optimizer, loader = accelerator.prepare(module, make_optimizer(module), task.loader())
    for (batch,) in loader:
        clock.tick()
        loss = module(batch)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()


def arms() -> dict[str, Callable[[Task, Clock], None]]:
    """Return the arms that can run here; the second one by hand shows how far apart equal arms are."""
    found = {"by hand": by_hand, "by hand again": by_hand, "Trainer": with_trainer, "OwnLoop": with_own_loop}
    peers = {"lightning": ("Lightning", with_lightning), "accelerate": ("Accelerate", with_accelerate)}
    return found | {name: arm for library, (name, arm) in peers.items() if importlib.util.find_spec(library)}


# Measurements


def step_times(options: argparse.Namespace, *, compiles: bool = False) -> list[dict[str, Any]]:
    """Return step time and peak memory of each arm over the hand-written loop, and the utilization of the device."""
    task = Task(options, compiles=compiles)
    seconds: dict[str, list[float]] = {}
    peaks: dict[str, list[int]] = {}
    rounds = 1 if options.tiny else 5
    started = time.perf_counter()
    for number in range(rounds):
        for name, train in arms().items():
            clock = task.clock()
            train(task, clock)
            seconds.setdefault(name, []).append(clock.seconds / task.steps)
            peaks.setdefault(name, []).append(clock.peak)
            free(task.device)
        if number >= 1 and time.perf_counter() - started > options.seconds * number / (number + 1):
            break  # another round might not end in time
    figures = []
    label = f"{options.name}{', compiled' if compiles else ''}"
    for name, samples in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(samples, seconds["by hand"], strict=True))
        goal = GOALS["step time"] if name == "Trainer" and compiles else None
        ms = 1000 * statistics.median(samples)
        figures.append(figure(f"{label}: step time of {name}, over by hand", ratio, "x", goal, note=f"{ms:.3f} ms"))
        if min(peaks["by hand"]):
            memory = max(peaks[name]) / max(peaks["by hand"])
            goal = GOALS["peak memory"] if name == "Trainer" else None
            note = f"{max(peaks[name]) / 2**20:.0f} MiB"
            figures.append(figure(f"{label}: peak memory of {name}, over by hand", memory, "x", goal, note=note))
    return figures + utilization(task, seconds, label)


def utilization(task: Task, seconds: dict[str, list[float]], label: str) -> list[dict[str, Any]]:
    """Return the model FLOPs utilization of the Trainer and of the hand-written loop, where the peak is known."""
    from dstrat.training.callbacks.throughput_monitor import peak_flops

    if task.name == "mlp" or task.device.type != "cuda":
        return []
    peak = peak_flops(torch.cuda.get_device_name(task.device), torch.bfloat16, allows_tf32=False)
    if peak is None:
        return []
    flops = make_module(task.name, tiny=task.tiny).flops()
    return [
        figure(f"{label}: model FLOPs utilization of {arm}", flops / statistics.median(seconds[arm]) / peak, "")
        for arm in ("by hand", "Trainer")
    ]


def compiled_step_times(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return :func:`step_times` of a compiled module."""
    torch._dynamo.config.cache_size_limit = 64  # noqa: SLF001 - torch's documented setting; each arm has its module
    return step_times(options, compiles=True)


def checkpoints(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return the seconds of saving and loading with dstrat, torch.save and torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    from dstrat.checkpoint.async_io import AsyncCheckpointIO
    from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

    task = Task(options, compiles=False)
    module = task.module().to(task.device)
    optimizer = make_optimizer(module)
    module(next(iter(task.loader()))[0].to(task.device)).backward()
    optimizer.step()
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    moments = {
        names[id(p)]: {key: state[key] for key in ("exp_avg", "exp_avg_sq")} for p, state in optimizer.state.items()
    }
    state = {"module": module.state_dict(), "optimizer": moments}
    size = sum(t.nbytes for t in [*state["module"].values(), *(v for m in moments.values() for v in m.values())])
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        portable, asynchronous = PortableCheckpointIO(), AsyncCheckpointIO()
        saves: dict[str, Callable[[str], Any]] = {
            "dstrat": lambda path: portable.save_checkpoint(state, path),
            "torch.save": lambda path: torch.save(state, path),
            "DCP": lambda path: dcp.save(state, checkpoint_id=path, no_dist=True),
            "dstrat in the background, until the training goes on": lambda path: asynchronous.save_checkpoint(
                state, path
            ),
        }
        loads: dict[str, Callable[[str], Any]] = {
            "dstrat": portable.load_checkpoint,
            "torch.save": lambda path: torch.load(path, map_location="cpu"),
            "DCP": lambda path: dcp.load(state, checkpoint_id=path, no_dist=True),
        }
        for name, save in saves.items():
            samples = []
            for number in range(1 if options.tiny else 3):
                samples.append(timed(task.device, save, f"{folder}/{name[:12].strip()}-{number}"))
                if name not in loads:
                    asynchronous.teardown()  # waits for the write
            figures.append(figure(f"saving {size / 2**20:.0f} MiB: {name}", statistics.median(samples), "s"))
        for name, load in loads.items():
            seconds = timed(task.device, load, f"{folder}/{name[:12].strip()}-0")
            figures.append(figure(f"loading {size / 2**20:.0f} MiB: {name}", seconds, "s"))
    return figures


def estimates(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return how far estimates of ``dstrat estimate`` are from the device's largest memory, as a share of it."""
    from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training

    task = Task(options, compiles=False)
    shape = TINY_GPT if task.tiny else GPT_124M
    figures = []
    for alias, precision in (
        ("single_device", PRECISION),
        ("single_device", "32-true"),
        ("ddp", PRECISION),
        ("fsdp", PRECISION),
    ):
        strategy = dstrat.build(strategy=alias, accelerator=_quiet(task)["accelerator"], devices=1, precision=precision)

        def make() -> TrainingSetup:
            tokens = torch.zeros(shape.batch_size, shape.context + 1, dtype=torch.long)
            module = make_module(task.name, tiny=task.tiny)
            return TrainingSetup(module=module, batch=tokens, make_optimizers=make_optimizer)

        size = measure_training(
            make, strategy.precision_plugin, device_type=task.device.type, world_size=1, ranks_per_machine=1
        )
        layout = strategy.memory_layout(size)
        estimated = 0 if layout is None else size.peak(layout)
        measured = largest_in_training(task, alias, precision)
        free(task.device)
        share = estimated / measured - 1 if measured else 0.0
        note = f"{estimated / 2**20:.0f} MiB estimated, {measured / 2**20:.0f} MiB measured"
        figures.append(
            figure(f"estimate for {alias}, {precision}: share off", abs(share), "", GOALS["estimate"], note=note)
        )
    return figures


def largest_in_training(task: Task, alias: str, precision: str) -> int:
    """Return the device's largest memory in three steps; 0 on the CPU."""

    def train(loop: dstrat.OwnLoop) -> int:
        module = make_module(task.name, tiny=task.tiny)
        loop.setup(module, make_optimizer)
        for (batch,) in list(task.loader())[:3]:
            loop.backward(loop.compute(module, batch.to(loop.strategy.root_device)))
            loop.step()
        return torch.cuda.max_memory_allocated() if task.device.type == "cuda" else 0

    if task.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    strategy = dstrat.build(strategy=alias, accelerator=_quiet(task)["accelerator"], devices=1, precision=precision)
    return int(dstrat.OwnLoop(strategy).launch(train))


def timed(device: torch.device, function: Callable[[str], Any], path: str) -> float:
    """Return the seconds of a call."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    function(path)
    return time.perf_counter() - start


def free(device: torch.device) -> None:
    """Free what an arm has left."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def figure(name: str, value: float, unit: str, goal: float | None = None, note: str = "") -> dict[str, Any]:
    """Return a figure for the report; a goal is a largest value."""
    return {"name": name, "value": value, "unit": unit, "goal": goal, "note": note}


MEASUREMENTS: dict[str, tuple[str, Callable[[argparse.Namespace], list[dict[str, Any]]]]] = {
    "gpt": ("gpt", step_times),
    "gpt-compiled": ("gpt", compiled_step_times),
    "mlp": ("mlp", step_times),
    "checkpoints": ("gpt", checkpoints),
    "estimates": ("gpt", estimates),
}


def main() -> None:
    """Measure what the command line names, and write the figures."""
    parser = argparse.ArgumentParser(description="Measure one training on one device.")
    parser.add_argument("measurement", choices=MEASUREMENTS)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a small network and few steps")
    parser.add_argument("--seconds", type=float, default=60, help="begin no further round after it")
    parser.add_argument("--out", type=Path, required=True, help="file for the figures")
    options = parser.parse_args()
    options.name, measure = MEASUREMENTS[options.measurement]
    with contextlib.redirect_stdout(None):
        figures = measure(options)
    options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")
    for one in figures:
        print(f"{one['name']}: {one['value']:.4g} {one['unit']} {one['note']}".rstrip())


if __name__ == "__main__":
    main()
