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
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from gpt import GPT_124M, TINY_GPT, make_dataset, make_module, make_optimizer
from torch.utils.data import DataLoader

import dstrat

if TYPE_CHECKING:
    from collections.abc import Callable

PRECISION = "bf16-mixed"
FLOAT8 = ("float8", "float8-rowwise")
GOALS = {"step time": 1.005, "peak memory": 1.01, "estimate": 0.1, "loss": 0.02}
OF_DSTRAT = ("ddp", "single_device", "fsdp", "model_parallel")  # the others' libraries may wait for the device
ACTIVATIONS = tuple(
    f"ddp({option})"
    for option in ("activation_checkpointing='selective'", "activation_checkpointing='full'", "activation_offload=True")
)
STRATEGIES = (*OF_DSTRAT, *ACTIVATIONS, "ddp_sharded", *(f"deepspeed_stage_{stage}" for stage in (3, 2, 1, 0)))


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
        self.warmup, self.steps = (1, 2) if options.tiny else (20, 500) if self.name == "mlp" else (5, 20)
        self.compiles = compiles
        self.pins = True

    def module(self) -> Any:
        """Return the module, with the same weights each time."""
        module = make_module(self.name, tiny=self.tiny)
        if self.compiles:
            module.compile()
        return module

    def loader(self) -> DataLoader[Any]:
        """Return the loader; one step more than is timed, at whose beginning the time ends."""
        dataset, batch_size = make_dataset(self.name, self.warmup + self.steps + 1, tiny=self.tiny)
        return DataLoader(dataset, batch_size=batch_size, pin_memory=self.pins and self.device.type == "cuda")

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
            loss = self.network(batch[0])
            self.last_loss = loss.detach()
            return loss

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


def with_trainer_and_pageable_batches(task: Task, clock: Clock) -> None:
    """Train with dstrat's Trainer, which pins the batches itself."""
    task.pins = False
    try:
        with_trainer(task, clock)
    finally:
        task.pins = True


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
    found["Trainer with pageable batches"] = with_trainer_and_pageable_batches
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
        figures = ratios(options, seconds, peaks, compiles=compiles) + utilization(task, seconds, compiles=compiles)
        write_figures(options, figures)  # in case the next round does not end in time
        if time.perf_counter() - started > options.seconds * (number + 1) / (number + 2):
            break
    return figures


def ratios(
    options: argparse.Namespace, seconds: dict[str, list[float]], peaks: dict[str, list[int]], *, compiles: bool
) -> list[dict[str, Any]]:
    """Return step times and peak memory over those of the hand-written loop."""
    figures = []
    label = label_of(options.name, compiles=compiles)
    for name, samples in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(samples, seconds["by hand"], strict=True))
        goal = GOALS["step time"] if name == "Trainer" and compiles else None
        note = f"{1000 * statistics.median(samples):.3f} ms, {len(samples)} rounds"
        figures.append(figure(f"{label}: step time of {name}, over by hand", ratio, "x", goal, note=note))
        if min(peaks["by hand"]):
            memory = max(peaks[name]) / max(peaks["by hand"])
            goal = GOALS["peak memory"] if name == "Trainer" else None
            note = f"{max(peaks[name]) / 2**20:.0f} MiB"
            figures.append(figure(f"{label}: peak memory of {name}, over by hand", memory, "x", goal, note=note))
    return figures


def label_of(name: str, *, compiles: bool) -> str:
    """Return the beginning of the names of figures."""
    return f"{name}{', compiled' if compiles else ''}"


def utilization(task: Task, seconds: dict[str, list[float]], *, compiles: bool) -> list[dict[str, Any]]:
    """Return the model FLOPs utilization of the Trainer and of the hand-written loop, where the peak is known."""
    from dstrat.training.callbacks.throughput_monitor import peak_flops

    if task.name == "mlp" or task.device.type != "cuda":
        return []
    peak = peak_flops(torch.cuda.get_device_name(task.device), torch.bfloat16, allows_tf32=False)
    if peak is None:
        return []
    flops, label = make_module(task.name, tiny=task.tiny).flops(), label_of(task.name, compiles=compiles)
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


def low_precision(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return step time, peak memory and last loss of compiled trainings in 8 bits over those of bf16-mixed.

    On the CPU products in 8 bits are emulated.
    """
    if importlib.util.find_spec("torchao") is None:
        print("torchao is not installed", file=sys.stderr)
        return []
    torch._dynamo.config.cache_size_limit = 64  # noqa: SLF001 - torch's documented setting; each run has its module
    task = Task(options, compiles=not options.tiny)
    seconds, peaks, losses = {}, {}, {}
    for flag in (PRECISION, *FLOAT8):
        clock = task.clock()
        losses[flag] = train_with(task, clock, precision_of(flag, task.device))
        seconds[flag], peaks[flag] = clock.seconds / task.steps, clock.peak
        free(task.device)
    figures = []
    for flag in FLOAT8:
        name = f"gpt, {'' if options.tiny else 'compiled, '}{flag}"
        note = f"{1000 * seconds[flag]:.3f} ms"
        figures.append(
            figure(f"{name}: step time, over {PRECISION}", seconds[flag] / seconds[PRECISION], "x", note=note)
        )
        off = abs(losses[flag] / losses[PRECISION] - 1)
        note = f"{losses[flag]:.4f}, {losses[PRECISION]:.4f} with {PRECISION}"
        figures.append(figure(f"{name}: difference of the last loss, as a share", off, "", GOALS["loss"], note=note))
        if peaks[PRECISION]:
            note = f"{peaks[flag] / 2**20:.0f} MiB"
            figures.append(
                figure(f"{name}: peak memory, over {PRECISION}", peaks[flag] / peaks[PRECISION], "x", note=note)
            )
    return figures


def precision_of(flag: str, device: torch.device) -> Any:
    """Return a precision for a Trainer, products in 8 bits emulated on the CPU."""
    if flag == PRECISION or device.type == "cuda":
        return flag
    from dstrat_torchao import Float8Precision

    return Float8Precision(flag, emulate=True)


def train_with(task: Task, clock: Clock, precision: Any) -> float:
    """Train with dstrat's Trainer in a precision, and return the last loss."""
    trainer = dstrat.Trainer(strategy="single_device", **{**_quiet(task), "precision": precision})
    module = _train_module(dstrat.TrainModule, task, clock)
    trainer.fit(module, task.loader())
    return float(module.last_loss)


def strategies(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return memory, step time and waits for the device of each installed strategy on one device.

    These are the figures for the CUDA column of ``docs/choose.md``, and, where a strategy knows what it needs, how far
    ``dstrat estimate`` is from it.
    """
    task = Task(options, compiles=False)
    shape = TINY_GPT if task.tiny else GPT_124M
    figures: list[dict[str, Any]] = []
    seconds: dict[str, float] = {}
    for alias in STRATEGIES:
        try:
            run = measured_training(task, alias, PRECISION)
        except dstrat.DstratError as error:  # it is not installed, or does not run on this device
            print(f"{alias}: {error}", file=sys.stderr)
            continue
        seconds[alias] = run.seconds
        note = f"{1000 * run.seconds:.3f} ms"
        figures.append(figure(f"{alias}: step time, over ddp", run.seconds / seconds["ddp"], "x", note=note))
        if task.device.type == "cuda":
            goal = 0.0 if alias in OF_DSTRAT else None
            figures.append(figure(f"{alias}: waits for the device in a step", run.waits, "", goal))
            figures.append(figure(f"{alias}: peak memory", run.peak / 2**20, "MiB"))
        figures += estimate_figures(task, shape, alias, PRECISION, run.peak)
        write_figures(options, figures)
        free(task.device)
    run = measured_training(task, "single_device", "32-true")
    torch.set_float32_matmul_precision("high")
    in_tf32 = measured_training(task, "single_device", "32-true")
    torch.set_float32_matmul_precision("highest")
    note = f"{1000 * in_tf32.seconds:.3f} ms"
    share = in_tf32.seconds / run.seconds
    figures.append(figure('32-true: step time with matmul precision "high", over "highest"', share, "x", note=note))
    return figures + estimate_figures(task, shape, "single_device", "32-true", run.peak)


def estimate_figures(task: Task, shape: Any, alias: str, precision: str, peak: int) -> list[dict[str, Any]]:
    """Return how far an estimate of ``dstrat estimate`` is from the device's largest memory, as a share of it."""
    from dstrat.cli.estimate.fake_step import TrainingSetup, measure_training

    strategy = dstrat.build(strategy=alias, accelerator=_quiet(task)["accelerator"], devices=1, precision=precision)

    def make() -> TrainingSetup:
        tokens = torch.zeros(shape.batch_size, shape.context + 1, dtype=torch.long)
        module = make_module(task.name, tiny=task.tiny)
        return TrainingSetup(module=module, batch=tokens, make_optimizers=make_optimizer)

    size = measure_training(
        make, strategy.precision_plugin, device_type=task.device.type, world_size=1, ranks_per_machine=1
    )
    layout = strategy.memory_layout(size)
    if layout is None:
        return []
    estimated = size.peak(layout)
    share = estimated / peak - 1 if peak else 0.0
    note = f"{estimated / 2**20:.0f} MiB estimated, {peak / 2**20:.0f} MiB measured"
    return [figure(f"estimate for {alias}, {precision}: share off", abs(share), "", GOALS["estimate"], note=note)]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What a training with a strategy took.

    Attributes:
        peak: The device's largest memory; 0 on the CPU.
        seconds: Of a step.
        waits: For the device, in a step.
    """

    peak: int
    seconds: float
    waits: float


def measured_training(task: Task, alias: str, precision: str) -> Measured:
    """Return what some steps with a strategy take."""
    steps = 2 if task.tiny else 10

    def train(loop: dstrat.OwnLoop) -> Measured:
        module = make_module(task.name, tiny=task.tiny)
        loop.setup(module, make_optimizer)
        device = loop.strategy.root_device
        batches = [batch.to(device) for (batch,) in list(task.loader())[:3]]

        def step(number: int) -> None:
            loop.backward(loop.compute(module, batches[number % len(batches)]))
            loop.step()

        for number in range(2):  # the first ones make the optimizer's state and load kernels
            step(number)
        clock = Clock(device, 0, steps)
        for number in range(steps):
            clock.tick()
            step(number)
        clock.tick()
        waits = waits_of(lambda: step(0), device)
        peak = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
        return Measured(peak=peak, seconds=clock.seconds / steps, waits=waits)

    strategy = dstrat.build(strategy=alias, accelerator=_quiet(task)["accelerator"], devices=1, precision=precision)
    measured: Measured = dstrat.OwnLoop(strategy).launch(train)
    return measured


def waits_of(step: Callable[[], None], device: torch.device) -> float:
    """Return how often a step waits for the device, as torch reports it; 0 on the CPU."""
    if device.type != "cuda":
        step()
        return 0.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return float(sum("synchroniz" in str(warning.message) for warning in caught))


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


def write_figures(options: argparse.Namespace, figures: list[dict[str, Any]]) -> None:
    """Write the figures so far."""
    options.out.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


MEASUREMENTS: dict[str, tuple[str, Callable[[argparse.Namespace], list[dict[str, Any]]]]] = {
    "gpt": ("gpt", step_times),
    "gpt-compiled": ("gpt", compiled_step_times),
    "mlp": ("mlp", step_times),
    "checkpoints": ("gpt", checkpoints),
    "low-precision": ("gpt", low_precision),
    "strategies": ("gpt", strategies),
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
    write_figures(options, figures)
    for one in figures:
        print(f"{one['name']}: {one['value']:.4g} {one['unit']} {one['note']}".rstrip())


if __name__ == "__main__":
    main()
