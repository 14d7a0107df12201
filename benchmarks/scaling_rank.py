"""What dstrat's own coordination costs in each of many ranks: catalog, votes, metrics, plan of a save, reports.

``scaling_rank.py RANKS OUT`` forks the ranks, and writes a JSON file with milliseconds per call.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

import dstrat
from dstrat.checkpoint.portable.ranks import GroupRanks, Ranks
from dstrat.checkpoint.portable.write_plan import make_write_plan
from dstrat.parallel import process_group
from dstrat.plugins.catalog import get_catalog
from dstrat.training.loops.stopping import Votes

if TYPE_CHECKING:
    from collections.abc import Callable

CALLS = 10
NUM_TENSORS = 600  # of a transformer with 50 layers
NUM_METRICS = 16
TIMEOUT = timedelta(minutes=3)


class ManyRanks(Ranks):
    """A rank of a large job whose ranks all have the same tensors, so that its own messages are those of all."""

    size = 1024

    def exchange(self, message: bytes) -> list[bytes]:
        return [message] * self.size

    def any_rank(self, *, value: bool) -> bool:
        return value


def main(num_ranks: int, out: Path) -> None:
    """Fork the ranks, and write what they have measured."""
    torch.set_num_threads(1)
    begun = time.perf_counter()
    strategy = dstrat.build(strategy="ddp_fork", accelerator="cpu", devices=num_ranks)
    (ranks,) = [dstrat.OwnLoop(strategy).launch(measure_rank)]
    found: dict[str, Any] = {
        name: {
            "cpu": statistics.mean(rank[name]["cpu"] for rank in ranks),
            "cpu of rank 0": ranks[0][name]["cpu"],
            "wall": ranks[0][name]["wall"],
        }
        for name in ranks[0]
        if name != "opened"
    }
    found["start"] = max(rank["opened"] for rank in ranks) - begun
    out.write_text(json.dumps(found))


def measure_rank(loop: dstrat.OwnLoop) -> list[dict[str, Any]] | None:
    """Measure each part of the coordination in this rank; return what all ranks have found, on rank 0."""
    opened = time.perf_counter()
    strategy: Any = loop.strategy
    rank, size = strategy.global_rank, strategy.world_size
    catalog, votes, ranks = get_catalog(), Votes(strategy), GroupRanks(TIMEOUT)
    values = torch.zeros(2 * NUM_METRICS + 3, dtype=torch.float64)
    tensors = {f"layer.{number}.weight": torch.zeros(64, 64) for number in range(NUM_TENSORS)}
    store = job_store(strategy)
    process_group._job_stores[:] = [store]  # noqa: SLF001 - reports of a job on several machines, which has such a store
    parts: dict[str, Callable[[int], object]] = {
        "catalog": lambda call: process_group.check_same_catalog(
            catalog, dist.PrefixStore(f"catalog {call}", store), rank, size
        ),
        "vote": lambda _: votes.take(1, 0, 0),
        "metrics": lambda _: strategy.all_gather(values),
        "plan of a save": lambda _: make_write_plan(tensors, {}, ranks),
        "reading reports": lambda _: process_group.read_failure_reports(),
    }
    found: dict[str, Any] = {"opened": opened}
    for name, part in parts.items():
        found[name] = timed(part)
    gathered: list[Any] = [None] * size
    dist.all_gather_object(gathered, found)
    ranks.close()
    return gathered if rank == 0 else None


def job_store(strategy: Any) -> dist.Store:
    """Return a store like that of a job on several machines, served by rank 0; collective."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=1024) if strategy.is_global_zero else None
    port = strategy.broadcast(listening.getsockname()[1] if listening else None)
    return dist.TCPStore(
        "127.0.0.1",
        port,
        strategy.world_size,
        is_master=listening is not None,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach() if listening else None,
    )


def timed(part: Callable[[int], object]) -> dict[str, float]:
    """Return milliseconds of the processor, all threads, and of the clock for a call."""
    part(-1)
    dist.barrier()
    cpu, walls = time.process_time(), []
    for call in range(CALLS):
        begun = time.perf_counter()
        part(call)
        walls.append(time.perf_counter() - begun)
    return {"cpu": 1000 * (time.process_time() - cpu) / CALLS, "wall": 1000 * statistics.median(walls)}


def time_plan_of_many() -> float:
    """Return the milliseconds that a rank of 1,024 computes for the plan of a save."""
    tensors = {f"layer.{number}.weight": torch.zeros(64, 64) for number in range(NUM_TENSORS)}
    make_write_plan(tensors, {}, ManyRanks())
    begun = time.perf_counter()
    for _ in range(CALLS):
        make_write_plan(tensors, {}, ManyRanks())
    return 1000 * (time.perf_counter() - begun) / CALLS


if __name__ == "__main__":
    if sys.argv[1] == "plan":
        Path(sys.argv[2]).write_text(json.dumps(time_plan_of_many()))
    else:
        main(int(sys.argv[1]), Path(sys.argv[2]))
