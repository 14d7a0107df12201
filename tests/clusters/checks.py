"""Checks of a job that an engine has started, from the files that job.py writes."""

from __future__ import annotations

import csv
import json
import socket
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from tests.clusters.job import NUM_SAMPLES
from tests.warm_program import WarmProgram

JOB = Path(__file__).with_name("job.py")
PYTHON = sys.executable


def read_identities(folder: Path, attempt: int = 0) -> list[dict[str, object]]:
    """Return what each rank of an attempt has written about itself, by rank."""
    paths = sorted(folder.glob(f"rank-{attempt}-*.jsonl"), key=lambda path: int(path.stem.split("-")[2]))
    return [json.loads(path.read_text().splitlines()[0]) for path in paths]


def ranks(folder: Path, attempt: int = 0) -> list[tuple[int, int, int]]:
    """Return global rank, local rank and rank of the machine of each rank of an attempt."""
    identities = read_identities(folder, attempt)
    assert {identity["world_size"] for identity in identities} == {len(identities)}
    return [(each["rank"], each["local_rank"], each["node_rank"]) for each in identities]


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of each step, from the loggers' files: only global rank 0 writes, each step once."""
    values: dict[int, float] = {}
    for path in sorted(folder.glob("dstrat_logs/version_*/metrics.csv"), key=lambda path: int(path.parts[-2][8:])):
        with path.open() as table:
            rows = [(int(row["step"]), float(row["loss"])) for row in csv.DictReader(table)]
        assert len(rows) == len(dict(rows)), f"{path} has a step twice"
        values.update(rows)
    return values


def one_device_losses(folder: Path, max_epochs: int = 1) -> dict[int, float]:
    """Return the losses of the job in one process, which no engine has started."""
    WarmProgram(JOB, str(folder), f"--max-epochs={max_epochs}").run()
    return losses(folder)


def check_losses(folder: Path, expected: dict[int, float]) -> None:
    values = losses(folder)
    assert list(values) == list(expected)
    assert list(values.values()) == pytest.approx(list(expected.values()), rel=1e-5)


def check_samples(folder: Path, num_epochs: int = 1) -> None:
    """Check that the steps of which the final state consists have each sample of each epoch once."""
    attempts = sorted({int(path.stem.split("-")[1]) for path in folder.glob("rank-*.jsonl")})
    begins = [read_identities(folder, attempt)[0]["begin"] for attempt in attempts]
    counts: Counter[tuple[int, int]] = Counter()
    for attempt, begin, end in zip(attempts, begins, [*begins[1:], float("inf")], strict=True):
        for path in folder.glob(f"rank-{attempt}-*.jsonl"):
            for line in path.read_text().splitlines()[1:]:
                step, epoch, indices = json.loads(line)
                if begin < step <= end:
                    counts.update((epoch, index) for index in indices)
    assert counts == dict.fromkeys(((e, i) for e in range(num_epochs) for i in range(NUM_SAMPLES)), 1)


def check_no_survivors(folder: Path, seconds: float = 10) -> None:
    """Check that no process of the job is alive."""
    deadline = time.monotonic() + seconds
    while survivors := processes_of(folder):
        assert time.monotonic() < deadline, survivors
        time.sleep(0.1)


def processes_of(folder: Path, parent: int | None = None) -> list[int]:
    """Return the processes of a job, which have its folder as an argument; of one parent only if there is one."""
    alive = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            arguments = path.read_bytes().decode().split("\0")
            fields = (path.parent / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has ended
            continue
        if str(JOB) in arguments and str(folder) in arguments and parent in (None, int(fields[1])):
            alive.append(int(path.parts[2]))
    return alive


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def wait_for_step(folder: Path, step: int, rank: int = 0, attempt: int = 0, seconds: float = 60) -> None:
    """Wait until a rank has trained on so many steps."""
    path = folder / f"rank-{attempt}-{rank}.jsonl"
    deadline = time.monotonic() + seconds
    while not (path.exists() and any(line.startswith(f"[{step},") for line in path.read_text().splitlines())):
        assert time.monotonic() < deadline, f"{path} has no step {step}"
        time.sleep(0.05)
