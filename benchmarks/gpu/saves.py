"""Checkpoints of a device: saves in the background during steps, pinned memory, speed."""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from checks import Device, Figure, figure, run_checks

from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

GIB = 5.0
TENSORS = 40
LATE = 500_000_000  # cycles for which the device computes before a step's kernels: a quarter of a second


def _state(device: Device) -> dict[str, torch.Tensor]:
    gib = GIB if device.type == "cuda" else 0.01
    count = int(gib * 2**30 / 4 / TENSORS)
    return {f"layer{index}": torch.zeros(count, device=device.first) for index in range(TENSORS)}


def _synchronize(device: Device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device.first)


def _pinned_bytes(device: Device) -> int:
    """Return the bytes of host memory that torch has pinned; the kernel does not count all of them."""
    return int(torch.cuda.host_memory_stats()["allocated_bytes.current"]) if device.type == "cuda" else 0


def background(device: Device) -> list[Figure]:
    """A save in the background: how long training waits, and pinned memory."""
    state, io = _state(device), AsyncCheckpointIO(PortableCheckpointIO())
    size = sum(tensor.nbytes for tensor in state.values())
    before, figures = _pinned_bytes(device), []
    with tempfile.TemporaryDirectory() as folder:
        for number in ("first", "second"):
            _synchronize(device)
            started = time.perf_counter()
            io.save_checkpoint({"state_dict": state}, Path(folder) / number)
            seconds = time.perf_counter() - started
            figures.append(
                figure(f"{number} save in the background: training waits", seconds, "s", None, _gbs(size, seconds))
            )
            io.wait()  # or the next save would wait for it
        pinned = _pinned_bytes(device) - before
        io.teardown()
    figures.append(figure("pinned memory of a save, over its size", pinned / size, "x", 1.3 if pinned else None))
    return [*figures, figure("pinned memory after the run", (_pinned_bytes(device) - before) / 2**20, "MiB", 64.0)]


def _gbs(size: int, seconds: float) -> str:
    return f"{size / seconds / 1e9:.2f} GB/s of {size / 2**20:.0f} MiB"


def at_once(device: Device) -> list[Figure]:
    """Speed of a save that training waits for, beside torch.save and a copy to the host."""
    state = _state(device)
    size = sum(tensor.nbytes for tensor in state.values())
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        io = PortableCheckpointIO()
        ways: dict[str, Any] = {
            "dstrat": lambda: io.save_checkpoint({"state_dict": state}, Path(folder) / "dstrat"),
            "torch.save": lambda: torch.save(state, Path(folder) / "torch"),
            "a copy to the host": lambda: [tensor.cpu() for tensor in state.values()],
        }
        for name, save in ways.items():
            _synchronize(device)
            started = time.perf_counter()
            save()
            seconds = time.perf_counter() - started
            figures.append(figure(f"saving at once: {name}", seconds, "s", None, _gbs(size, seconds)))
    return figures


def _torn(device: Device, *, in_stream: bool, in_background: bool) -> None:
    state = {name: tensor[: 2**20] for name, tensor in _state(device).items()}
    state = {name: tensor.clone() for name, tensor in state.items()}
    _synchronize(device)
    portable = PortableCheckpointIO()
    io = AsyncCheckpointIO(portable) if in_background else portable
    stream = torch.Stream(device.first) if in_stream else contextlib.nullcontext()
    with tempfile.TemporaryDirectory() as folder, stream:
        if device.type == "cuda":
            torch.cuda._sleep(LATE)  # noqa: SLF001 - the device is late, as after a large step
        for tensor in state.values():
            tensor.fill_(3)  # the step
        io.save_checkpoint({"state_dict": state}, Path(folder) / "saved")
        for tensor in state.values():
            tensor.fill_(4)  # the next step
        io.teardown()
        saved = portable.load_checkpoint(Path(folder) / "saved")["state_dict"]
    _synchronize(device)
    wrong = [name for name, tensor in saved.items() if not bool((tensor == 3).all())]
    assert not wrong, f"{len(wrong)} of {len(saved)} tensors are not those of their step"


def of_its_step(device: Device) -> str:
    """A save has the weights of its step: at once and in the background, in the default stream and in another."""
    device.require("cuda", "simulated_gpu")
    for in_background in (False, True):
        for in_stream in (False, True):
            _torn(device, in_stream=in_stream, in_background=in_background)
    return "four saves with kernels that are late"


if __name__ == "__main__":
    run_checks(of_its_step, background, at_once)
