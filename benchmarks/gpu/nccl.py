"""Layouts of two and four ranks over NCCL that share one GPU: losses, resumes, and ranks that fail."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from checks import Device, Figure, figure, run_checks

PROGRAM = Path(__file__).with_name("nccl_job.py")
AT_ONCE = 4  # jobs: ranks that share a GPU take turns, and a job starts for longer than it trains
SECONDS = 120  # of a job
LAYOUTS = {
    "ddp": 2,
    "fsdp": 2,
    "mesh(pp=2, microbatches=4)": 2,
    "mesh(tp=2)": 2,
    "mesh(pp=2, schedule='InterleavedZeroBubble', microbatches=2)": 2,  # stages of a rank in turn
    "mesh(cp=2)": 2,
    "mesh(cp=2, context_parallel='ring')": 2,
    "mesh(ep=2)": 2,
    "mesh(pp=2, tp=2, microbatches=4)": 4,
    "mesh(dp_replicate=2)": 4,
    "deepspeed_stage_2": 2,
    "deepspeed_stage_3": 2,
    "ddp_sharded": 2,
    "bagua": 2,
}
FAULTS = ("raises", "killed", "sleeps")
GOAL = 1e-5  # of losses: the GPU adds in another order for other shapes


def _run(device: Device, folder: Path, strategy: str, devices: int, *options: str) -> tuple[str, float, Path]:
    """Run a job; return what it printed, its seconds and the file of its losses."""
    out = folder / f"{strategy}{''.join(options)}.json"
    command = [sys.executable, str(PROGRAM), "--strategy", strategy, "--devices", str(devices), "--out", str(out)]
    command += ["--accelerator", device.accelerator, *options]
    started = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
        text = done.stderr
    except subprocess.TimeoutExpired as error:
        text = f"{(error.stderr or b'').decode()}\nit was over after {SECONDS} s"
    return text, time.monotonic() - started, out


def layouts(device: Device) -> list[Figure]:
    """Each layout has the losses of one rank, and a resume has those of the run."""
    figures = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name)
        jobs = {
            strategy: pool.submit(_run, device, folder, strategy, devices)
            for strategy, devices in {"single_device": 1, **LAYOUTS}.items()
        }
        for strategy, job in jobs.items():
            text, seconds, out = job.result()
            if "MissingRequirementError" in text:
                continue
            if not out.exists():
                print(f"--- {strategy}\n{text[-4000:]}", flush=True)
                figures.append(figure(f"{strategy}: largest difference of losses", float("inf"), "", GOAL, _last(text)))
                if strategy == "single_device":  # with which all others are compared
                    return figures
                continue
            result: Any = json.loads(out.read_text(encoding="utf-8"))
            if strategy == "single_device":
                expected = result["losses"]
            apart = max(abs(a / b - 1) for a, b in zip(result["losses"], expected, strict=True))
            resumed, after = result["resumed"], result["losses"][-len(result["resumed"]) :]
            off = max(abs(a / b - 1) for a, b in zip(resumed, after, strict=True))
            note = f"{seconds:.0f} s, {result['peak']:.0f} MiB"
            figures.append(figure(f"{strategy}: largest difference of losses", apart, "", GOAL, note))
            figures.append(figure(f"{strategy}: largest difference after a resume", off, "", 1e-6))
    return figures


def faults(device: Device) -> list[Figure]:
    """A rank that raises, dies or sleeps is named, and the job ends."""
    figures = []
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(name)
        jobs = {
            (strategy, fault): pool.submit(_run, device, folder, strategy, 2, "--fault", fault)
            for strategy in ("ddp", "fsdp", "mesh(pp=2)")
            for fault in FAULTS
        }
        for (strategy, fault), job in jobs.items():
            text, seconds, _ = job.result()
            named = next((line for line in text.splitlines() if "rank 1" in line), "")
            print(f"--- {strategy}, {fault}\n{text[-6000:]}", flush=True)
            note = named.strip()[:160] or _last(text)
            figures.append(figure(f"{strategy}, a rank {fault}: another rank is named", not named, "", 0, note))
            figures.append(figure(f"{strategy}, a rank {fault}: seconds of the job", seconds, "s", 60))
    return figures


def _last(text: str) -> str:
    return next((line.strip()[:160] for line in reversed(text.splitlines()) if line.strip()), "")


if __name__ == "__main__":
    run_checks(layouts, faults)
