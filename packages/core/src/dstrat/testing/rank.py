"""What a warm process does to become a rank of the kit's, and what it sends back."""

from __future__ import annotations

import ctypes
import faulthandler
import os
import signal
import sys
import time
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.builtin.launchers.failures import FailureKind, kind_of
from dstrat.testing.loopback import LoopbackCluster
from dstrat.testing.place import Place

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

_STAYS = 60.0  # seconds
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What a rank sends back.

    Attributes:
        value: What the function returned.
        failure: The traceback of what it raised; empty where it returned.
        headline: The exception in one line.
        kind: Whether the failure is the rank's own.
        time_ns: When it ended, nanoseconds since the epoch.
    """

    value: Any = None
    failure: str = ""
    headline: str = ""
    kind: FailureKind = "own"
    time_ns: int = 0


def run_rank(
    pipe: Any,
    place: tuple[Any, ...],
    folder: Path,
    path: Sequence[str],
    function: Callable[..., Any],
    arguments: dict[str, Any],
) -> None:
    """Be a rank: run the function and send what came of it."""
    rank, world_size, _, _ = place
    _prepare(rank, folder, path)
    try:
        here = Place(rank=rank, world_size=world_size, folder=folder, cluster=LoopbackCluster(*place))
        report = Report(value=function(here, **arguments), time_ns=time.time_ns())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test tells of it
        report = Report(
            failure=traceback.format_exc(),
            headline=f"{type(error).__name__}: {error}".partition("\n")[0],
            kind=kind_of(error),
            time_ns=time.time_ns(),
        )
    pipe.send(report)
    if not report.failure:
        pipe.poll(_STAYS)  # until all have answered: the others may still be connecting to this one
    _leave()


def _prepare(rank: int, folder: Path, path: Sequence[str]) -> None:
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = (folder / f"stack-{rank}").open("wb", buffering=0)
    faulthandler.register(signal.SIGQUIT, stacks, all_threads=True)
    sys.path[:] = path
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback))
    import torch

    torch.set_num_threads(1)


def _leave() -> None:
    """End without tidying up, which takes longer than many a test."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
