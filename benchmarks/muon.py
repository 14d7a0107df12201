"""Measure Muon on shards: differences of losses to one device, bytes sent, memory and time of an optimizer step.

For example::

    python benchmarks/muon.py

Ranks on the CPU train a small network with torch's fully_shard, and step the matrices of a larger one.
"""

from __future__ import annotations

import json
from typing import Any

from job import run_job, script, torchrun
from rich.console import Console
from rich.table import Table

OPTIMIZERS = ("torch.optim.Muon", "Muon, bfloat16", "Muon, float32")
MIB = 2**20


def main() -> None:
    """Print the table."""
    table = Table("optimizer", "ranks", "difference", "matrices, MiB", "sent, MiB", "temporary, MiB", "ms of a step")
    for name in OPTIMIZERS:
        expected = measured(name, 1)["losses"]
        for ranks in (1, 2, 4):
            one = measured(name, ranks)
            difference = max(abs(loss - other) / other for loss, other in zip(one["losses"], expected, strict=True))
            sizes = (f"{one[key] / MIB:.1f}" for key in ("matrices", "sent", "temporary"))
            table.add_row(name, str(ranks), f"{difference:.1e}", *sizes, f"{1000 * one['seconds']:.0f}")
    Console(width=120).print(table)


def measured(optimizer: str, ranks: int) -> dict[str, Any]:
    """Return what rank 0 measures."""
    arguments = [f"--optimizer={optimizer}"]
    command = script("muon_rank.py", *arguments) if ranks == 1 else torchrun(ranks, "muon_rank.py", *arguments)
    lines = run_job(command).output.splitlines()
    result: dict[str, Any] = json.loads(next(line for line in lines if line.startswith("{")))
    return result


if __name__ == "__main__":
    main()
