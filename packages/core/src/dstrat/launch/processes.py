"""Start methods of ranks: popen, spawn, forkserver and fork."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import warnings
from dataclasses import dataclass, replace
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dstrat.launch import command, rank
from dstrat.launch.signals import STOP_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dstrat.launch.job import LocalJob
    from dstrat.launch.signals import Interrupts, Watchdog

_BOOTSTRAP = Path(__file__).with_name("bootstrap.py")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankProcess:
    """A rank, as its supervisor sees it.

    Attributes:
        rank: Its global rank.
        pid: Its process id, which is also that of its process group.
        poll: Returns its exit code, negative for a signal, or None while it runs.
    """

    rank: int
    pid: int
    poll: Callable[[], int | None]

    def with_rank(self, rank: int) -> RankProcess:
        """Return the same process with another rank."""
        return replace(self, rank=rank)


def start_script(job: LocalJob, local_rank: int, script: command.Command) -> RankProcess:
    """Start a rank that runs the user's script once more."""
    arguments = [script.kind, script.target, *script.argv]
    # Where this process imported multiprocessing: a script that has changed its directory since will do so again.
    directory = multiprocessing.process.ORIGINAL_DIR  # type: ignore[attr-defined]  # not in typeshed
    if directory and not Path(directory).is_dir():  # removed since
        directory = None
    return _start_interpreter(job, local_rank, script.flags, arguments, directory)


def start_spawned(job: LocalJob, local_rank: int) -> RankProcess:
    """Start a fresh interpreter that runs the function in the job's folder."""
    return _start_interpreter(job, local_rank, command.interpreter_flags(), ["function"], directory=None)


def start_served(job: LocalJob, local_rank: int, interrupts: Interrupts) -> RankProcess:
    """Let multiprocessing's fork server start a rank that runs the function in the job's folder."""
    context = multiprocessing.get_context("forkserver")
    # Has no effect if the server runs already.
    # The first handler that is registered with atexit runs last, so the server's own comes first.
    # torch._dynamo takes as long to import as torch, and each rank would import it with its first optimizer.
    libraries = ["torch", "torch._dynamo"] if "torch" in sys.modules else []
    first, last = "dstrat.launch.fork_server", "dstrat.launch.fork_server_ready"
    context.set_forkserver_preload([first, *libraries, __name__, last])
    # The environment is passed, because the server may have been started with another one.
    arguments = (job.folder, job.rank_environment(local_rank), os.getpid())
    process = context.Process(target=_run_served, args=arguments)
    resource_tracker.ensure_running()  # before, as its start unblocks signals
    with interrupts.blocked():  # until it has left this process group, see fork_server
        forkserver.ensure_running()
    with hidden_main(), interrupts.raised():  # the server answers when it has imported torch, after seconds
        process.start()
    return _rank_process(job, local_rank, process)


def start_forked(
    job: LocalJob, local_rank: int, call: Callable[[], object], interrupts: Interrupts, watchdog: Watchdog
) -> RankProcess:
    """Start a rank as a fork of this process."""
    process = multiprocessing.get_context("fork").Process(
        target=_run_forked, args=(job, local_rank, call, interrupts, watchdog, os.getpid())
    )
    # A signal between the fork and the rank's set-up would only reach the handler that it has inherited.
    with warnings.catch_warnings(), _no_garbage_collection(), interrupts.blocked():
        # A process with torch always has threads, of which Python warns; _run_forked avoids using them.
        warnings.simplefilter("ignore", DeprecationWarning)
        process.start()
    return _rank_process(job, local_rank, process)


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection until :func:`_run_forked` has frozen the objects that the fork inherits.

    The destructor of an inherited object may wait for a thread that fork does not copy: that of a process group hangs
    or crashes.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _start_interpreter(
    job: LocalJob, local_rank: int, flags: tuple[str, ...], arguments: list[str], directory: str | None
) -> RankProcess:
    process = subprocess.Popen(  # noqa: S603 - it is the command that the user has started
        [sys.executable, *flags, str(_BOOTSTRAP), str(job.folder), str(os.getpid()), *arguments],
        env=job.rank_environment(local_rank),
        cwd=directory,
        stdin=subprocess.DEVNULL,  # ranks would take each other's lines of it
        start_new_session=True,  # not only a group: the terminal may stop a background group that writes to it
    )
    return RankProcess(rank=job.global_rank(local_rank), pid=process.pid, poll=process.poll)


def _rank_process(job: LocalJob, local_rank: int, process: Any) -> RankProcess:
    return RankProcess(rank=job.global_rank(local_rank), pid=process.pid, poll=lambda: process.exitcode)


def _run_forked(
    job: LocalJob,
    local_rank: int,
    call: Callable[[], object],
    interrupts: Interrupts,
    watchdog: Watchdog,
    parent: int,
) -> None:
    gc.freeze()  # before gc.enable: it exempts what exists now, which is the parent's
    gc.enable()
    os.setsid()  # its own group, which the supervisor ends with its children
    watchdog.let_go()
    _replace_environment(job.rank_environment(local_rank))
    if torch := sys.modules.get("torch"):
        torch.set_num_threads(1)  # fork does not copy the threads of the parent's pool, and using it would hang
    rank.enter_rank(job.folder, runs_script=False, parent=parent)

    def run() -> None:
        rank.note_launch()
        interrupts.restore()  # the parent's handlers record signals and do nothing else
        rank.write_result(job.folder, call())

    sys.exit(rank.exit_code_of(job.folder, run))


def _run_served(folder: Path, environ: dict[str, str], supervisor: int) -> None:
    if not folder.exists():  # a signal has ended the job while it waited for the server
        os._exit(1)
    os.setsid()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)  # where the server could not import what unblocks them
    # The fork server outlives the supervisor if another copy of that holds the pipe open.
    rank.die_with_supervisor(supervisor)
    _replace_environment(environ)  # of the server, which may be from an earlier job
    if torch := sys.modules.get("torch"):
        # torch read it when the server imported torch; "4,2" is for nested parallel regions.
        torch.set_num_threads(int(environ["OMP_NUM_THREADS"].partition(",")[0]))
    rank.enter_rank(folder, runs_script=False, parent=None)
    sys.exit(rank.exit_code_of(folder, lambda: rank.run_function(folder)))


def _replace_environment(environ: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environ)


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Prevent multiprocessing from importing the user's script in a new process.

    A rank imports it itself, after its set-up, so that a failure of the script is reported with its traceback.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
