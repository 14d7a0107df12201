"""Cost of checkpoints in memory after every tenth step, over the same steps without, on one machine and on two."""

from __future__ import annotations

import json
import statistics
import tempfile
from typing import TYPE_CHECKING, Any

from figure import Figure, medians_of, ratio_of
from job import run_job, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings


def measure(settings: Settings) -> Iterator[Figure]:
    """Train on two ranks, with checkpoints after every second group of ten steps."""
    for strategy in ("DDPStrategy", "FSDPStrategy"):
        for nodes in (1, 2):
            measured = _run(strategy, nodes, pairs=3 if settings.quick else 10)
            steps = statistics.median(cpu for _, cpu in measured["without"])
            samples = {"a save alone": measured["alone"], "10 steps": [cpu for _, cpu in measured["without"]]}
            title = f"{strategy} on {nodes} machine{'s' if nodes > 1 else ''}"
            yield Figure(
                name=f"CPU time of 10 steps and a checkpoint in memory, over 10 steps, {title}",
                value=1 + statistics.median(measured["alone"]) / steps,
                goal=1.02,
                medians=medians_of(samples),
                samples=samples,
                note=f"{measured['parameters'] / 1e6:.1f} million parameters with AdamW, 512 tokens of a rank and step",
            )
            times = {arm: [seconds for seconds, _ in measured[arm]] for arm in ("with", "without")}
            yield Figure(
                name=f"time of 10 steps with a checkpoint in memory, over 10 without, {title}",
                value=ratio_of(times, "with", over="without"),
                goal=1.02,
                medians={**medians_of(times), "save call": statistics.median(measured["calls"])},
                samples=times,
                note="only where the machine does nothing else",
            )


def _run(strategy: str, nodes: int, pairs: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        arguments = [f"--strategy={strategy}", f"--nodes={nodes}", f"--pairs={pairs}"]
        arguments += [f"--folder={folder}", f"--memory={memory}"]
        lines = run_job(torchrun(2, "in_memory_rank.py", *arguments), patience=1200.0).output.splitlines()
    measured: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return measured
