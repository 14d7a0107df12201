"""Entry point of a warm process that becomes a rank of the kit."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
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
    from pathlib import Path

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
        is_as_before: Whether another function would find the process as this one did.
    """

    value: Any = None
    failure: str = ""
    headline: str = ""
    kind: FailureKind = "own"
    time_ns: int = 0
    is_as_before: bool = False


def run_rank(pipe: Any, place: tuple[Any, ...], folder: Path) -> None:
    """Be a rank: run what is sent, one function after the other, and send what came of it.

    A rank that has failed ends, so that the others learn of it; one that has not waits, as others may still be
    connecting to it, until the pipe is closed.
    """
    rank, world_size, _, _ = place
    _prepare(rank, folder)
    cluster = LoopbackCluster(*place)
    has_failed = False
    while not has_failed:
        try:
            sys.path[:] = pipe.recv()
        except EOFError:
            break
        report = _run(pipe, rank, world_size, cluster)
        pipe.send(report)
        has_failed = bool(report.failure)
    _leave()


def _run(pipe: Any, rank: int, world_size: int, cluster: LoopbackCluster) -> Report:
    try:
        function, folder, arguments = pipe.recv()
        here = Place(rank=rank, world_size=world_size, folder=folder, cluster=cluster)
        value = function(here, **arguments)
        return Report(value=value, time_ns=time.time_ns(), is_as_before=_is_as_before())
    except BaseException as error:  # noqa: BLE001 - whatever it is, the test tells of it
        return Report(
            failure=traceback.format_exc(),
            headline=f"{type(error).__name__}: {error}".partition("\n")[0],
            kind=kind_of(error),
            time_ns=time.time_ns(),
        )


def _is_as_before() -> bool:
    import torch
    import torch.distributed as dist

    is_open = dist.is_available() and dist.is_initialized()
    return not is_open and torch.get_default_dtype() is torch.float32 and torch.is_grad_enabled()


def _prepare(rank: int, folder: Path) -> None:
    gc.freeze()  # a search for garbage would visit, and so copy, all that the process it was forked from has loaded
    os.setsid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    output = os.open(folder / f"output-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    stacks = (folder / f"stack-{rank}").open("wb", buffering=0)
    faulthandler.register(signal.SIGQUIT, stacks, all_threads=True)
    loopback = "lo" if sys.platform == "linux" else "lo0"
    os.environ.update(dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), loopback))
    import torch

    torch.set_num_threads(1)


def _leave() -> None:
    """End without tidying up, which takes longer than many a test."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
