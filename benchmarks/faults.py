"""Things that go wrong in a rank in the middle of a training, and what becomes of the job.

As a program it lets each fault happen in each launch mode and family, and prints how the jobs ended::

    python benchmarks/faults.py
    python benchmarks/faults.py --mode popen --family ddp --fault hangs

A job survives its fault when it ends by itself, and not as if nothing had happened.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

FAULTS = {
    "raises": (1, "rank 1 raises"),
    "killed": (1, "rank 1 is killed"),
    "busy": (0, "rank 0 raises while rank 1 is busy"),
    "stubborn": (1, "rank 1 raises, rank 0 is busy and ignores SIGTERM"),
}
"""For each fault, the rank that fails, and what happens."""

STEP = 5


def fault_on_step(fault: str, fault_time: str | None) -> Callable[[int], None]:
    """Return what makes a rank fail, or stand in the way of ending the job, in a step of the training.

    Args:
        fault: One of ``FAULTS``.
        fault_time: Where the failing rank writes the time.
    """
    culprit, _ = FAULTS[fault]
    rank = int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK", "0"))  # Lightning sets only the second

    def on_step(step: int) -> None:
        if step != STEP:
            return
        if rank == culprit:
            time.sleep(0.5)  # until the other rank is where it should be
            Path(fault_time or os.devnull).write_text(repr(time.time()))
            if fault == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ValueError(f"rank {rank} fails, as it was asked to")
        if fault == "stubborn":
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if fault in ("busy", "stubborn"):
            _work(60)

    return on_step


def _work(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        time.sleep(0.01)


MODES = ("popen", "spawn", "fork", "forkserver", "torchrun")
FAMILIES = ("ddp", "fsdp", "deepspeed_stage_2")
TIMEOUT = 6.0
"""Seconds, the strategy's ``timeout``; it ends the jobs of a rank that hangs."""
GOALS = "goals: all named, nothing left, median below 1 s, worst below 10 s, and below 11 s where a rank hangs"


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a job with a fault ended.

    Attributes:
        fault: What went wrong.
        seconds: From the fault to the end of the job.
        survived: Whether it ended by itself, and not well.
        named: Whether its output names the rank.
        leftovers: Whether processes had to be killed.
    """

    fault: str
    seconds: float
    survived: bool
    named: bool
    leftovers: bool

    def __str__(self) -> str:
        words = [f"{self.fault}, ended after {self.seconds:.2f} s"]
        words += [] if self.survived else ["NOT SURVIVED"]
        words += [] if self.named else ["NOT NAMED"]
        words += ["LEFT PROCESSES"] if self.leftovers else []
        return ", ".join(words)

    @property
    def hangs(self) -> bool:
        """Whether others can notice the fault only by the time that they wait."""
        return "hangs" in self.fault or "stopped" in self.fault


def main() -> None:
    """Let the faults happen that were asked for, and print the table."""
    from fault_job import DEEDS
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(description="Let ranks fail in many ways, and see how the jobs end.")
    parser.add_argument("--mode", action="append", choices=MODES)
    parser.add_argument("--family", action="append", choices=FAMILIES)
    parser.add_argument("--fault", action="append", choices=list(DEEDS))
    options = parser.parse_args()
    console = Console()
    heads = ("mode", "family", "tried", "ended", "named", "left", "median", "worst", "hang")
    # One blank between the columns, or they take more than 80.
    table = Table(*heads, caption=GOALS, box=SIMPLE, padding=0)
    for mode in options.mode or MODES:
        for family in options.family or FAMILIES:
            ends = []
            for fault in options.fault or DEEDS:
                for rank in (0, 1):
                    ends.append(run_fault(mode, family, fault, rank))
                    console.print(f"{mode} {family}: {ends[-1]}", highlight=False)
            table.add_row(*_row(mode, family, ends))
    console.print(table)


def _row(mode: str, family: str, ends: list[End]) -> tuple[str, ...]:
    prompt, hanging = ([end.seconds for end in ends if end.hangs is hangs] for hangs in (False, True))
    counts = (len(ends), sum(end.survived for end in ends), sum(end.named for end in ends))
    seconds = (
        statistics.median(prompt) if prompt else None,
        max(prompt, default=None),
        max(hanging, default=None),
    )
    return (
        mode,
        family,
        *map(str, counts),
        str(sum(end.leftovers for end in ends)),
        *("" if value is None else f"{value:.2f} s" for value in seconds),
    )


def run_fault(mode: str, family: str, fault: str, rank: int) -> End:
    """Run a job in which a rank fails."""
    from job import run_job, script, torchrun

    with tempfile.TemporaryDirectory() as folder:
        moment = Path(folder, "moment")
        arguments = [f"--mode={mode}", f"--family={family}", f"--fault={fault}", f"--rank={rank}"]
        arguments += [f"--moment={moment}", f"--timeout={TIMEOUT}"]
        command = torchrun(2, "fault_job.py", *arguments) if mode == "torchrun" else script("fault_job.py", *arguments)
        job = run_job(command, patience=120.0, must_work=False)
        if not moment.exists():
            raise RuntimeError(f"the job ended before its fault:\n{job.output[-4000:]}")
        named = [f"rank {rank} of 2 "] + ([f"rank      : {rank} "] if mode == "torchrun" else [])
        return End(
            fault=f"{fault} on rank {rank}",
            seconds=job.ended_at - float(moment.read_text()),
            survived=job.returncode != 0 and not job.leftovers,
            named=any(words in job.output for words in named),
            leftovers=job.leftovers,
        )


if __name__ == "__main__":
    main()
