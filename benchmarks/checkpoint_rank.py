"""Saves and loads checkpoints of the same bytes with torch and with dstrat, in one rank or in several.

Prints one line of JSON with the seconds of each arm.  Sharded ranks each hold a part of every tensor; for torch.save
rank 0 holds all of them, which is what a job has to gather for it.  Loads of shards are compared with those of
torch.distributed.checkpoint, which verifies nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from dstrat.checkpoint.async_io import AsyncCheckpointIO
from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO

if TYPE_CHECKING:
    from collections.abc import Callable

COLUMNS, ROWS_OF_MIB = 4096, 64  # of float32
MEGABYTE = 1024 * 1024


def main() -> None:
    """Measure each arm once, in turn."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensor-mib", type=int, default=16)
    parser.add_argument("--loads-only", action="store_true")
    options = parser.parse_args()
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size > 1:
        dist.init_process_group("gloo")
    made = tensors(options.mib // options.tensor_mib, options.tensor_mib, world_size)
    if options.loads_only:
        measured = measure_loads(options.folder, made)
    else:
        measured = measure(options.folder, made, options, world_size)
    if int(os.environ.get("RANK", "0")) == 0:
        print(json.dumps(measured), flush=True)
    if world_size > 1:
        dist.destroy_process_group()


def measure(
    folder: Path, made: dict[str, torch.Tensor], options: argparse.Namespace, world_size: int
) -> dict[str, float]:
    """Return the seconds of each arm, and the bytes on disk and in memory."""
    rank = dist.get_rank() if world_size > 1 else 0
    io, measured = PortableCheckpointIO(), {}
    checkpoint = {"state_dict": made}
    io.save_checkpoint({}, folder / "first")  # opens connections, imports what is missing
    before = anonymous_memory()
    measured["portable save"] = timed(lambda: io.save_checkpoint(checkpoint, folder / "portable"))
    measured["extra MiB"] = most((anonymous_memory(peak=True) - before) / MEGABYTE)
    measured["bytes"] = sum(file.stat().st_size for file in (folder / "portable").iterdir())
    if world_size == 1:
        measured |= loads("portable", lambda: io.load_checkpoint(folder / "portable"), folder / "portable")
        measured |= background(checkpoint, folder)
    clear(folder / "portable", rank)
    if rank == 0:
        whole = checkpoint
        if world_size > 1:
            whole = {"state_dict": tensors(len(made), options.tensor_mib, 1)}
    measured["torch save"] = timed(lambda: torch_save(whole, folder / "torch") if rank == 0 else None)
    if world_size == 1:
        measured |= loads("torch", lambda: torch.load(folder / "torch", weights_only=True), folder / "torch")
    clear(folder / "torch", rank)
    return measured


def measure_loads(folder: Path, made: dict[str, torch.Tensor]) -> dict[str, float]:
    """Return the seconds of loads: of full tensors, or into shards."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    io, checkpoint = PortableCheckpointIO(), {"state_dict": made}
    io.save_checkpoint(checkpoint, folder / "portable")
    if dist.is_initialized():
        measured = loads("portable", lambda: io.load_into(folder / "portable", checkpoint), folder / "portable")
        clear(folder / "portable", rank)
        dcp.save(checkpoint, checkpoint_id=folder / "torch")
        measured |= loads("torch", lambda: dcp.load(checkpoint, checkpoint_id=folder / "torch"), folder / "torch")
    else:
        measured = loads("portable", lambda: io.load_checkpoint(folder / "portable"), folder / "portable")
        clear(folder / "portable", rank)
        torch_save(checkpoint, folder / "torch")
        measured |= loads("torch", lambda: torch.load(folder / "torch", weights_only=True), folder / "torch")
    clear(folder / "torch", rank)
    return measured


def loads(arm: str, load: Callable[[], object], path: Path) -> dict[str, float]:
    """Return how long loading takes from the disk, and when the files are in the system's cache."""
    os.sync()  # pages that are not written yet stay in the cache
    for file in path.iterdir() if path.is_dir() else [path]:
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return {f"{arm} load from disk": timed(load), f"{arm} load from cache": timed(load)}


def background(checkpoint: dict[str, Any], folder: Path) -> dict[str, float]:
    """Return how long a training stands still in the first and in a later save in the background."""
    io, measured = AsyncCheckpointIO(PortableCheckpointIO()), {}
    for arm in ("first stand still", "stand still"):
        measured[arm] = timed(lambda: io.save_checkpoint(checkpoint, folder / "background"))
        io.wait()
        shutil.rmtree(folder / "background")
    return measured


def tensors(num_tensors: int, mib: int, world_size: int) -> dict[str, torch.Tensor]:
    """Return tensors of a size in MiB, sharded over the ranks."""
    mesh = init_device_mesh("cpu", (world_size,)) if world_size > 1 else None
    made = {}
    for number in range(num_tensors):
        local = torch.randn(mib * ROWS_OF_MIB // world_size, COLUMNS)
        made[f"layers.{number}.weight"] = local if mesh is None else DTensor.from_local(local, mesh, [Shard(0)])
    return made


def torch_save(checkpoint: dict[str, Any], path: Path) -> None:
    """Write a file with torch.save, and flush it."""
    with path.open("wb") as file:
        torch.save(checkpoint, file)
        file.flush()
        os.fsync(file.fileno())


def timed(function: Callable[[], object]) -> float:
    """Return the seconds until all ranks are through."""
    barrier()
    started = time.perf_counter()
    result = function()
    barrier()
    seconds = time.perf_counter() - started
    del result
    return seconds


def barrier() -> None:
    """Wait for the other ranks."""
    if dist.is_initialized():
        dist.barrier()


def clear(path: Path, rank: int) -> None:
    """Remove what an arm has written, and let the disk come to rest."""
    barrier()
    if rank == 0:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        os.sync()
    barrier()


def most(value: float) -> float:
    """Return the largest value of all ranks."""
    values = torch.tensor([value])
    if dist.is_initialized():
        dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return float(values)


def anonymous_memory(*, peak: bool = False) -> int:
    """Return the memory that this process has now, in bytes, or the most that it had since the last call."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    memory = int(lines["VmHWM" if peak else "VmRSS"].split()[0]) * 1024
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again here
    return memory


if __name__ == "__main__":
    main()
