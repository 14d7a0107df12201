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

from torch import Tensor

from dstrat.errors import DstratError, RankFailedError
from dstrat.testing.ranks.fits import Fit, NoCallback, make_trainer
from dstrat.testing.ranks.modules import ActingNet, Net
from dstrat.testing.suite import fail
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.testing.ranks.jobs import Subject
    from dstrat.testing.ranks.team import Place


Misdeed = Literal["nothing", "raises", "dies", "hangs"]

_EXIT_CODE = 7
WORDS = "this rank has had enough"


@dataclass(frozen=True, kw_only=True, slots=True)
class JobResult:
    """How a job ended.

    Attributes:
        error: Class and message of what ``fit`` raised; empty where it raised nothing.
        rank: The rank that the error blames; None where it blames none.
        seconds: From the launch to the end.
        left: Processes that still run.
        steps: Optimizer steps, as the process that launched it knows them afterwards.
        has_trained: Whether the user's module has other parameters than before; None where they are sharded.
    """

    error: str
    rank: int | None
    seconds: float
    left: list[str]
    steps: int
    has_trained: bool | None


class Misbehaving(ActingNet):
    """One rank raises, dies or hangs in its third batch."""

    at_batch = 2
    culprit = -1
    misdeed: Misdeed = "nothing"

    def interrupt(self) -> None:
        if self.global_rank != self.culprit:
            return
        if self.misdeed == "raises":
            raise ValueError(WORDS)
        if self.misdeed == "dies":
            os._exit(_EXIT_CODE)
        if self.misdeed == "hangs":
            time.sleep(1000)


class _LooksAtSockets(Callback):
    """Notes on what a rank listens, when training starts and when it ends."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_train_start(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the hook's
        self.found += open_to_others()

    def on_train_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the hook's
        self.found += open_to_others()


class LeavesTrace(Callback):
    """Leaves a file for each rank that trains.

    Args:
        folder: Where.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_end(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the hook's
        (self.folder / f"trained-{trainer.global_rank}").touch()


def launch(
    place: Place, subject: Subject, accelerator: str, devices: int, misdeed: Misdeed, times: int = 1
) -> list[JobResult]:
    """Fit several times in this process, which launches the ranks.

    Args:
        place: The only rank of a job.
        subject: Starts processes by a method that needs no script.
        accelerator: Where.
        devices: How many ranks it launches.
        misdeed: What the last of them does.
        times: How often.
    """
    adopt_orphans()
    _be(Path(__file__))
    return [_launch(place, subject, accelerator, devices, misdeed) for _ in range(times)]


def sockets(place: Place, subject: Subject, accelerator: str) -> list[str]:
    """Train in a rank; return on what it listened for others than this machine."""
    looks = _LooksAtSockets()
    work = Fit(samples=16, accelerator=accelerator)
    make_trainer(place, subject, work, [looks]).fit(Net(work, subject.configure_model))
    return list(dict.fromkeys(looks.found))


def at_a_prompt(place: Place, subject: Subject, accelerator: str, devices: int) -> JobResult:
    """Fit as in a notebook, where there is no script that could be run again."""
    adopt_orphans()
    _be(None)
    return _launch(place, subject, accelerator, devices, "nothing")


def _be(script: Path | None) -> None:
    """Let this process look as if it ran a script, or as a prompt, where there is none."""
    main = ModuleType("__main__")
    if script is not None:
        main.__file__ = str(script)
    sys.modules["__main__"] = main


def _launch(place: Place, subject: Subject, accelerator: str, devices: int, misdeed: Misdeed) -> JobResult:
    work = Fit(samples=64, accelerator=accelerator)
    module = Misbehaving(work, subject.configure_model)
    module.culprit, module.misdeed = devices - 1, misdeed
    before = [parameter.detach().clone() for parameter in module.parameters()]
    begun, error, rank, steps = time.monotonic(), "", None, 0
    alone = replace(place, world_size=devices)
    try:
        trainer = make_trainer(alone, subject, work, [NoCallback()], plugins=None)
        trainer.fit(module)
        steps = trainer.global_step
    except (DstratError, ValueError) as raised:
        error = f"{type(raised).__name__}: {raised}"
        rank = raised.rank if isinstance(raised, RankFailedError) else None
    seconds = time.monotonic() - begun
    has_trained = _differ(before, [parameter.data for parameter in module.parameters()])
    return JobResult(error=error, rank=rank, seconds=seconds, left=left_over(), steps=steps, has_trained=has_trained)


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
    """Make this process the parent of what its children leave behind, so that it can be found."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def left_over(patience: float = 1.5) -> list[str]:
    """Return what still runs of everything that this process and its children have started, after a moment."""
    deadline = time.monotonic() + patience
    while (found := _descendants()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def open_to_others() -> list[str]:
    """Return the addresses beyond the loopback on which this process listens."""
    own = _own_sockets()
    found = []
    for name in ("tcp", "tcp6"):
        for line in (_PROC / "self" / "net" / name).read_text().splitlines()[1:]:
            columns = line.split()
            address, port = columns[1].split(":")
            if columns[3] == _LISTENS and columns[9] in own and not _LOOPBACK.fullmatch(address):
                found.append(f"{'every address' if not address.strip('0') else address}, port {int(port, 16)}")
    return found


def _own_sockets() -> set[str]:
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
    """Return the living processes below this one, as people recognise them."""
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
        words = (_PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return f"process {pid}"
    return f"process {pid} ({' '.join(words)[:80].strip()})"


# A script as a user's: it trains through the Trainer with an alias, in processes that start as the alias says.


_JOB = "job.pickle"


def run_program(
    subject: Subject, folder: Path, *, devices: int, accelerator: str, seconds: float, environ: Mapping[str, str]
) -> list[str]:
    """Run the script; return the processes that trained. Fail the test where the script fails.

    Args:
        subject: The strategy.
        folder: Where the script finds its job and leaves what came of it.
        devices: Number of ranks.
        accelerator: Where.
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
    import torch

    from dstrat.testing.ranks.fits import Fit
    from dstrat.testing.ranks.modules import Net
    from dstrat.training.trainer import Trainer

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
