"""A rank that hangs: what the host shows while a device computes, NCCL's counts, and the rank that is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from checks import Device, Figure, Net, figure, make_loader, run_checks
from gpt import GPT, GPT_124M, TINY_GPT

CYCLES = 10**10  # some five seconds of a GPU
SECONDS = 4.0
LIMIT = timedelta(seconds=10)

# A process that waits for its device: which way is its argument, and its processor time and stack are looked at.
WAITS = """
import faulthandler, signal, sys
import torch
from gpt import GPT, GPT_124M
way = sys.argv[1]
if way == "blocking":
    import ctypes
    driver = ctypes.CDLL("libcuda.so.1")
    assert driver.cuInit(0) == 0
    assert driver.cuDevicePrimaryCtxSetFlags_v2(0, 4) == 0  # CU_CTX_SCHED_BLOCKING_SYNC
faulthandler.register(signal.SIGUSR1, all_threads=False)
device = torch.device("cuda", 0)
model, tokens = GPT(GPT_124M).to(device), torch.zeros(2, 1025, dtype=torch.long, device=device)
model(tokens).backward()
torch.cuda.synchronize()
torch.cuda._sleep({cycles})
print("begun", flush=True)
if way == "queue":
    for _ in range(50):
        model(tokens).backward()
else:
    torch.zeros(1, device=device).item()
print("ended", flush=True)
"""

COUNTS = """
import json, os, sys, time
import torch
import torch.distributed as dist
from dstrat.launch.nccl_status import describe_collectives
from dstrat.parallel.internals import nccl_counts
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
torch.cuda.set_device(0)
dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=torch.device("cuda", 0))
x = torch.ones(4, device="cuda")
dist.all_reduce(x)
torch.cuda.synchronize()
time.sleep(1.5)
print(json.dumps(nccl_counts()), describe_collectives(nccl_counts()), sep="; ")
torch.cuda._sleep({cycles})
dist.all_reduce(x)
time.sleep(1.5)
print(describe_collectives(nccl_counts()))
dist.destroy_process_group()
"""


def _environ() -> dict[str, str]:
    here = str(Path(__file__).resolve().parent)
    return {**os.environ, "PYTHONPATH": os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])}


def _share_of_a_processor(pid: int, seconds: float) -> float:
    def ticks() -> int:
        user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
        return int(user) + int(system)

    before = ticks()
    time.sleep(seconds)
    return (ticks() - before) / os.sysconf("SC_CLK_TCK") / seconds


def waiting_host(device: Device) -> list[Figure]:
    """What a host that waits for its device shows: its share of a processor, and its innermost frames."""
    device.require("cuda")
    import signal

    figures = []
    for way in ("item", "blocking", "queue"):
        command = [sys.executable, "-c", WAITS.format(cycles=CYCLES), way]
        process = subprocess.Popen(command, env=_environ(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            begun = process.stdout.readline()
            share = _share_of_a_processor(process.pid, SECONDS / 2) if begun else 0.0
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.5)
        finally:
            process.kill()
        stack = process.communicate()[1].strip().splitlines()
        found = [re.search(r'([^/"]+)", line (\d+),? in (.*)', line) for line in stack]
        frames = " < ".join(f"{frame[3]} ({frame[1]}:{frame[2]})" for frame in found[:8] if frame)
        figures.append(figure(f"processor of a host that waits ({way})", share, "", None, frames or "no stack"))
    return figures


def counts_of_nccl(device: Device) -> str:
    """NCCL's counts say whether a collective is pending."""
    device.require("cuda")
    command = [sys.executable, "-c", COUNTS.format(cycles=CYCLES)]
    done = subprocess.run(command, env=_environ(), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    first, second = done.stdout.strip().splitlines()[-2:]
    assert "nothing is pending" in first, first
    assert "NCCL: pending" in second, second
    return f"{first}; then {second}"


class _Hangs(Net):
    """Rank 1 stays in its third step, at work or asleep; the other one waits for it."""

    def __init__(self, *, computes: bool) -> None:
        super().__init__()
        self.computes = computes
        if computes:  # many kernels, which fill the queue
            self.gpt = GPT(TINY_GPT if not torch.cuda.is_available() else GPT_124M)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2 and self.trainer.global_rank == 1:
            time.sleep(600)
        if self.computes:
            loss = loss + 0 * self.gpt(torch.zeros(1, 17, dtype=torch.long, device=self.device))
        return loss


def _named_rank(device: Device, *, computes: bool) -> str:
    from dstrat_ddp import DDPStrategy

    options: dict[str, Any] = {"timeout": LIMIT, "start_method": "spawn"}
    devices: Any = 2
    if device.type == "cuda":
        options |= {"parallel_devices": [device.first, device.first], "process_group_backend": "gloo"}
        devices = "auto"
    started = time.monotonic()
    try:
        device.trainer(strategy=DDPStrategy(**options), devices=devices).fit(_Hangs(computes=computes), make_loader(12))
    except Exception as error:  # noqa: BLE001 - looked at below
        text = f"{error} {' '.join(getattr(error, '__notes__', ()))}"
    else:
        raise AssertionError("the job has not ended by an error")
    line = next((line for line in text.splitlines() if "rank 1" in line), "")
    assert line, text[:500]
    return f"after {time.monotonic() - started:.0f} s: {line.strip()[:160]}"


def hung_rank(device: Device) -> str:
    """Of two ranks on one device the one that hangs is named."""
    return _named_rank(device, computes=False)


def hung_rank_of_gpt(device: Device) -> str:
    """The same while the other one has a full queue of kernels."""
    return _named_rank(device, computes=True)


if __name__ == "__main__":
    run_checks(counts_of_nccl, waiting_host, hung_rank, hung_rank_of_gpt)
