"""Check of an all-reduce between two processes of this machine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from dstrat.cli.diagnosis.finding import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

_RANKS = 2
_GRACE = 10.0  # seconds for the job to end itself after it was asked to


def check_all_reduce(seconds: float) -> Iterator[Finding]:
    """Start two ranks that add their numbers; the time limit holds whatever they do."""
    subject = f"all-reduce on {_RANKS} processes"
    started = time.monotonic()
    process = subprocess.Popen(  # noqa: S603 - this very interpreter and module
        [sys.executable, "-m", __name__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        _, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _end(process)
        text = f"no result after {seconds:g} s: the loopback is blocked, or the start is slow (try a longer --seconds)"
        yield Finding(subject=subject, text=text, state="problem")
        return
    if process.returncode == 0:
        yield Finding(subject=subject, text=f"works with gloo, in {time.monotonic() - started:.1f} s")
    else:
        *_, last = ["", *errors.splitlines()]
        yield Finding(subject=subject, text=f"failed with exit code {process.returncode}: {last}", state="problem")


def _end(process: subprocess.Popen[str]) -> None:
    """Let the supervisor end its ranks; kill it where it does not, and they die with it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.communicate(timeout=_GRACE)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def _sum_of_ranks() -> float:
    """Return, in a rank, the sum of all ranks plus one each."""
    import torch

    from dstrat.builtin.clusters.local import LocalEnvironment
    from dstrat.parallel.collectives import reduce_tensor
    from dstrat.parallel.process_group import close_process_group, open_process_group

    cluster = LocalEnvironment()
    open_process_group(cluster, backend="gloo", timeout=timedelta(seconds=60))
    total = reduce_tensor(torch.tensor(cluster.global_rank + 1.0), reduce_op="sum")
    close_process_group()
    return float(total)


def _main() -> None:
    from dstrat.builtin.launchers.local import LocalLauncher
    from dstrat.errors import DstratError

    expected = float(sum(range(1, _RANKS + 1)))
    try:
        total = LocalLauncher(num_processes=_RANKS, start_method="spawn").launch(_sum_of_ranks)
    except DstratError as error:
        sys.exit(str(error).partition("\n")[0])  # the rank's traceback follows
    if total != expected:
        sys.exit(f"the sum was {total}, and should have been {expected}")


if __name__ == "__main__":
    _main()
