"""Jobs that the strategy itself launches, watched from the process that launches them."""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor
from typing_extensions import override

from dstrat.errors import DstratError, RankFailedError
from dstrat.testing.ranks.fits import Fit, make_trainer
from dstrat.testing.ranks.modules import ActingNet, Net
from dstrat.testing.suite import fail
from dstrat.training.callbacks.callback import Callback
from dstrat.training.trainer import Trainer

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.testing.ranks.jobs import Subject
    from dstrat.testing.ranks.team import RankContext


Fault = Literal["nothing", "raises", "dies", "hangs"]

_EXIT_CODE = 7
ERROR_MESSAGE = "this rank fails on purpose"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        error: Class and message of what ``fit`` raised; empty where it raised nothing.
        rank: The rank that the error names; None where it names none.
        seconds: From the launch to the end.
        running: Processes that still run.
        steps: Optimizer steps, as the process that launched it knows them afterwards.
        has_trained: Whether the user's module has other parameters than before; None where they are sharded.
    """

    error: str
    rank: int | None
    seconds: float
    running: list[str]
    steps: int
    has_trained: bool | None


class FaultyNet(ActingNet):
    """One rank raises, dies or hangs in its third batch."""

    at_batch = 2
    failing_rank = -1
    fault: Fault = "nothing"

    def interrupt(self) -> None:
        if self.global_rank != self.failing_rank:
            return
        if self.fault == "raises":
            raise ValueError(ERROR_MESSAGE)
        if self.fault == "dies":
            os._exit(_EXIT_CODE)
        if self.fault == "hangs":
            time.sleep(1000)  # longer than any timeout of the kit


class _SocketRecorder(Callback):
    """Records the public addresses on which a rank listens, when training starts and when it ends."""

    def __init__(self) -> None:
        self.addresses: list[str] = []

    @override
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.addresses += public_addresses()

    @override
    def on_train_end(self, trainer: Any, module: Any) -> None:
        self.addresses += public_addresses()


class LeavesTrace(Callback):
    """Leaves a file for each rank that trains.

    Args:
        folder: Folder of the files.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @override
    def on_train_end(self, trainer: Any, module: Any) -> None:
        (self.folder / f"trained-{trainer.global_rank}").touch()


def launch(
    rank_context: RankContext, subject: Subject, accelerator: str, devices: int, fault: Fault, times: int = 1
) -> list[JobResult]:
    """Fit several times in this process, which launches the ranks.

    Args:
        rank_context: The only rank of a job.
        subject: Starts processes by a method that needs no script.
        accelerator: Alias of the accelerator.
        devices: Number of ranks that it launches.
        fault: The fault of the last of them.
        times: Number of fits.
    """
    adopt_orphans()
    _set_main(is_script=True)
    return [_launch(rank_context, subject, accelerator, devices, fault) for _ in range(times)]


def sockets(rank_context: RankContext, subject: Subject, accelerator: str) -> list[str]:
    """Train in a rank; return the addresses beyond the loopback on which it listened."""
    looks = _SocketRecorder()
    work = Fit(samples=16, accelerator=accelerator)
    make_trainer(rank_context, subject, work, [looks]).fit(Net(work, subject.configure_model))
    return list(dict.fromkeys(looks.addresses))


def at_a_prompt(rank_context: RankContext, subject: Subject, accelerator: str, devices: int) -> JobResult:
    """Fit as in a notebook, where there is no script that could be run again."""
    adopt_orphans()
    _set_main(is_script=False)
    return _launch(rank_context, subject, accelerator, devices, "nothing")


def _set_main(*, is_script: bool) -> None:
    """Set ``__main__`` as if this process ran a script, as this module with ``python -m``; or a prompt without one."""
    main = ModuleType("__main__")
    if is_script:
        main.__file__, main.__spec__ = __file__, __spec__
    sys.modules["__main__"] = main


def _launch(rank_context: RankContext, subject: Subject, accelerator: str, devices: int, fault: Fault) -> JobResult:
    work = Fit(samples=64, accelerator=accelerator)
    module = FaultyNet(work, subject.configure_model)
    module.failing_rank, module.fault = devices - 1, fault
    before = [parameter.detach().clone() for parameter in module.parameters()]
    begun, error, rank, steps = time.monotonic(), "", None, 0
    alone = replace(rank_context, world_size=devices)  # this process plays the user's, which has no rank
    try:
        trainer = make_trainer(alone, subject, work, [], plugins=None)
        trainer.fit(module)
        steps = trainer.global_step
    except (DstratError, ValueError) as raised:  # ValueError is FaultyNet's own, from a run in this process
        error = f"{type(raised).__name__}: {raised}"
        rank = raised.rank if isinstance(raised, RankFailedError) else None
    seconds = time.monotonic() - begun
    has_trained = _differ(before, [parameter.data for parameter in module.parameters()])
    return JobResult(
        error=error, rank=rank, seconds=seconds, running=remaining_processes(), steps=steps, has_trained=has_trained
    )


def _differ(before: list[Tensor], after: list[Tensor]) -> bool | None:
    """Return whether parameters differ; None where some are sharded."""
    if any(type(new) is not Tensor or new.is_meta for new in after):
        return None
    return any(not new.cpu().equal(old) for old, new in zip(before, after, strict=True))


# Snapshot of the process table and of listening sockets.


_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_PROC = Path("/proc")
_LISTENS = "0A"  # include/net/tcp_states.h
_LOOPBACK = re.compile(r"0100007F|0000000000000000FFFF00000100007F|00000000000000000000000001000000", re.IGNORECASE)
_OF_MULTIPROCESSING = "resource_tracker"  # which ends with the interpreter that needs it


def can_look() -> bool:
    """Return whether this system shows its processes and sockets in /proc."""
    return sys.platform == "linux" and (_PROC / "self" / "net" / "tcp").exists()


def adopt_orphans() -> None:
    """Make this process the parent of the orphans of its children, so that they are listed below it."""
    # Else init is their parent, and a process that outlives the rank that started it would not be found.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def remaining_processes(patience: float = 1.5) -> list[str]:
    """Return the descendants of this process that still run after a short wait."""
    deadline = time.monotonic() + patience
    while (remaining := _descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return remaining


def public_addresses() -> list[str]:
    """Return the addresses beyond the loopback on which this process listens."""
    inodes = _socket_inodes()
    addresses = []
    for name in ("tcp", "tcp6"):
        for line in (_PROC / "self" / "net" / name).read_text().splitlines()[1:]:
            columns = line.split()
            address, port = columns[1].split(":")
            if columns[3] == _LISTENS and columns[9] in inodes and not _LOOPBACK.fullmatch(address):
                addresses.append(f"{'every address' if not address.strip('0') else address}, port {int(port, 16)}")
    return addresses


def _socket_inodes() -> set[str]:
    sockets = set()
    for descriptor in (_PROC / "self" / "fd").iterdir():
        try:
            target = os.readlink(descriptor)  # noqa: PTH115 - what it names is no path
        except OSError:  # closed by another thread, or the one that lists this folder
            continue
        if target.startswith("socket:["):
            sockets.add(target[8:-1])
    return sockets


def _descendants() -> list[str]:
    """Return the living descendants of this process with their command lines."""
    parents: dict[int, int] = {}
    for folder in _PROC.iterdir():
        if folder.name.isdigit():
            try:
                state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:  # it has ended
                continue
            if state not in "ZX":
                parents[int(folder.name)] = int(parent)
    return [name for pid in parents if _is_below(pid, parents) and _OF_MULTIPROCESSING not in (name := _name(pid))]


def _is_below(pid: int, parents: dict[int, int]) -> bool:
    while (pid := parents.get(pid, 0)) > 1:
        if pid == os.getpid():
            return True
    return False


def _name(pid: int) -> str:
    try:
        arguments = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({' '.join(arguments)[:80].strip()})"


# A user's script: the Trainer with an alias, in processes started by its method


_JOB = "job.pickle"


def run_program(
    subject: Subject, folder: Path, *, devices: int, accelerator: str, seconds: float, environ: Mapping[str, str]
) -> list[str]:
    """Run the script; return the processes that trained. Fail the test where the script fails.

    Args:
        subject: The strategy.
        folder: Folder of the script's input and output.
        devices: Number of ranks.
        accelerator: Alias of the accelerator.
        seconds: How long it may take.
        environ: Its environment variables, beside those of this process.
    """
    __tracebackhide__ = True
    (folder / _JOB).write_bytes(pickle.dumps((subject, devices, accelerator)))
    command = [sys.executable, "-m", "dstrat.testing.ranks.launching", str(folder)]
    environ = {**os.environ, **environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            command, env=environ, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        printed = (error.stderr or b"").decode(errors="replace")
        fail(f"a script that trains with {subject.component.alias!r} was not done in {seconds:.0f} s", details=printed)
    if done.returncode != 0:
        fail(
            f"a script that trains with {subject.component.alias!r} exited with code {done.returncode}",
            details=(done.stderr or done.stdout)[-3000:],
        )
    return sorted(path.name for path in folder.glob("trained-*"))


def main() -> None:
    """Train, and leave a file for each rank that did."""
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    subject, devices, accelerator = pickle.loads((folder / _JOB).read_bytes())  # noqa: S301 - the test wrote it
    subject.cls  # noqa: B018 - registers what no distribution offers
    trainer = Trainer(
        strategy=subject.make() if subject.options else subject.component.alias,
        accelerator=accelerator,
        devices=devices * subject.devices_per_process,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        callbacks=LeavesTrace(folder),
        default_root_dir=folder,
    )
    work = Fit(samples=16, accelerator=accelerator)
    trainer.fit(Net(work, subject.configure_model))


if __name__ == "__main__":
    main()
