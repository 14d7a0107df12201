"""Programs with a process for each rank, all copies of one that has imported what neighbours import, for seconds."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.warm_program import WarmProgram

if TYPE_CHECKING:
    from pathlib import Path

SECONDS = 300.0
SECONDS_AFTER_FAILURE = 10.0  # for the other ranks to end by themselves

multiprocessing.set_forkserver_preload(
    [
        *("torch._dynamo", "transformers.trainer", "transformers.models.llama.modeling_llama", "accelerate", "peft"),
        *("deepspeed", "deepspeed.module_inject.auto_ep_layer", "dstrat_transformers", "lightning.pytorch"),
        *("dstrat_ddp.strategy", "dstrat_deepspeed.strategy", "dstrat_fsdp.strategy", "dstrat_mesh.strategy"),
        *("dstrat.builtin.accelerators.cpu", "dstrat.training.run", "tests.warm_program"),
    ]
)


@dataclass(frozen=True)
class Ended:
    """How the ranks of a program have ended, as the process of a launcher would show it."""

    returncode: int
    stdout: str
    stderr: str


def run_in_ranks(script: Path, *arguments: str, devices: int, **environ: str) -> Ended:
    """Run a script in each rank, with the variables that torchrun sets if there are several; return what all print."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_RUN_ID": str(port), "GROUP_RANK": "0"}
    job |= {"WORLD_SIZE": str(devices), "LOCAL_WORLD_SIZE": str(devices)}
    of_ranks = [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(devices)] if devices > 1 else [{}]
    ranks = [WarmProgram(script, *arguments, environ={**of_rank, **environ}) for of_rank in of_ranks]
    wait_for(ranks)
    outputs = [rank.communicate(SECONDS) for rank in ranks]
    codes = [rank.returncode or 0 for rank in ranks]
    return Ended(max(map(abs, codes)), "".join(out for out, _ in outputs), "".join(err for _, err in outputs))


def wait_for(ranks: list[WarmProgram]) -> None:
    """Wait for the end of all ranks, and kill those that go on for long after one has failed."""
    deadline, has_failed = time.monotonic() + SECONDS, False
    while any(rank.poll() is None for rank in ranks) and time.monotonic() < deadline:
        if not has_failed and any(rank.poll() for rank in ranks):
            has_failed, deadline = True, time.monotonic() + SECONDS_AFTER_FAILURE
        time.sleep(0.02)
    for rank in ranks:
        if rank.poll() is None:
            os.killpg(rank.pid, signal.SIGKILL)
