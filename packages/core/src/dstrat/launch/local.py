"""Launcher that starts and supervises the ranks of this machine."""

from __future__ import annotations

import multiprocessing
import os
import sys
import weakref
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args

from dstrat.errors import LaunchError, RankFailedError, RequestError
from dstrat.interfaces.launcher import Launcher
from dstrat.launch import command, external, processes, rank
from dstrat.launch.fast_exit import leave_quickly_if_uncaught
from dstrat.launch.job import Job, describe_unpicklable, open_job, read_payload
from dstrat.launch.processes import RankProcess, StartMethod
from dstrat.launch.recovery import Recovery, path_exists, wait_for_restart
from dstrat.launch.signals import Interrupts, Watchdog, stop_signals
from dstrat.launch.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from datetime import timedelta
    from types import TracebackType

    from dstrat.launch.recovery import FailedAttempt

T = TypeVar("T")

_STOP_SECONDS = "DSTRAT_STOP_SECONDS"


class LocalLauncher(Launcher):
    """Starts one process per local rank, and supervises them from the calling process.

    The calling process runs no rank itself, so it survives the failure of any.  A rank that raises, dies or hangs
    ends the job, and the error names it.  With ``"popen"`` the ranks run the user's script once more, and ``launch``
    never returns here: it raises ``SystemExit(0)`` when the script has ended in all ranks.

    Args:
        num_processes: Number of ranks on this machine.
        start_method: ``"popen"`` runs the script once more in each rank.  The others run only the function:
            ``"spawn"`` in fresh interpreters, ``"forkserver"`` in copies of a process that has loaded torch, and
            ``"fork"`` in copies of this one, where each is limited to one thread.
        num_nodes: Number of machines; with more than one, the user starts the script on each, with ``MASTER_ADDR``,
            ``MASTER_PORT`` and ``NODE_RANK`` in the environment.
        environ: The user's environment, which the ranks inherit.
        grace: Seconds between SIGTERM and SIGKILL for a rank that is ended.
        stop_grace: Seconds for all ranks to stop after their current step, after the first SIGINT, SIGTERM or SIGHUP;
            None takes them from ``DSTRAT_STOP_SECONDS`` in the environment, 30 by default.
        max_restarts: How often all ranks are started again after one of them has failed.
        recovers_checkpoint: Returns whether a checkpoint is complete, by its path and number of optimizer steps, so
            that an attempt can continue from it; called after an attempt has failed.
        hang_timeout: How long a rank may be idle before it has come to its launch, where ranks run the script; None
            for any time.
        preemption_deadline: Seconds within which a scheduler ends the job after SIGTERM or SIGUSR1, which all ranks
            have to stop then; None leaves SIGUSR1 to the program.

    Attributes:
        failed_attempts: The attempts of the last launch that have failed.

    Raises:
        RequestError: There is no such start method, or the environment has no number of seconds.
    """

    def __init__(
        self,
        *,
        num_processes: int,
        start_method: StartMethod = "popen",
        num_nodes: int = 1,
        environ: Mapping[str, str] = os.environ,
        grace: float = 1.5,
        stop_grace: float | None = None,
        max_restarts: int = 0,
        recovers_checkpoint: Callable[[str, int], bool] = path_exists,
        hang_timeout: timedelta | None = None,
        preemption_deadline: float | None = None,
    ) -> None:
        if start_method not in get_args(StartMethod):
            raise RequestError(f"start_method {start_method!r} is not one of {', '.join(get_args(StartMethod))}")
        self.num_processes = num_processes
        self.start_method = start_method
        self.num_nodes = num_nodes
        self.environ = environ
        self.grace = grace
        stop_grace = preemption_deadline if stop_grace is None else stop_grace
        self.stop_grace = _stop_seconds(environ) if stop_grace is None else stop_grace
        self.max_restarts, self.recovers_checkpoint = max_restarts, recovers_checkpoint
        self.hang_timeout = hang_timeout
        self.stop_signals = stop_signals(includes_preemption=preemption_deadline is not None)
        self.failed_attempts: list[FailedAttempt] = []

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "environ": dict(self.environ)}  # os.environ itself cannot be pickled

    @property
    def runs_here(self) -> bool:
        return False

    @property
    def reruns_the_script(self) -> bool:
        return self.start_method == "popen"

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        launch = external.next_launch()
        try:
            return cast("T", self._launch(partial(function, *args, **kwargs)))
        except BaseException as error:
            external.record_failure(launch, error)  # ranks of later launches raise it again on their way
            if isinstance(error, LaunchError | KeyboardInterrupt):
                error.with_traceback(None)  # a user has no use for the supervisor's frames
            if isinstance(error, RankFailedError) and self.reruns_the_script:
                show_without_stack(error)
            leave_quickly_if_uncaught(has_peers=False)  # it has no peers: it runs no rank, and they have ended
            raise

    def _launch(self, call: partial[T]) -> Any:
        recovery = Recovery(self.max_restarts, self.recovers_checkpoint)
        self.failed_attempts = recovery.failed
        with Interrupts(self.stop_signals) as interrupts:  # first: a signal before the watchdog would leak the folder
            while True:
                job_context = open_job(
                    num_processes=self.num_processes,
                    num_nodes=self.num_nodes,
                    environ=self.environ,
                    restart_count=len(recovery.failed),
                )
                with job_context as job, Watchdog(job.folder) as watchdog:
                    recovery.begin_attempt(job.folder)
                    start = self._prepare(job, call, interrupts, watchdog)
                    try:
                        self._supervise(job, start, interrupts, watchdog)
                    except RankFailedError as error:
                        seconds = recovery.end_attempt(job.folder, error)
                    else:
                        recovery.end()
                        interrupts.restore()  # from here on a signal acts at once, also while a large result is read
                        if self.start_method == "popen":
                            raise SystemExit(0)  # the ranks have run the rest of the script
                        return self._result(job)
                wait_for_restart(seconds, interrupts)  # when nothing of the attempt is left

    def _prepare(
        self, job: Job, call: partial[T], interrupts: Interrupts, watchdog: Watchdog
    ) -> Callable[[int], RankProcess]:
        """Do everything that can fail before a process is started, and return the function that starts a rank."""
        if self.start_method == "popen":
            script = command.rerun_command(sys.orig_argv, sys.argv, sys.modules["__main__"])
            external.save(job.folder)
            return partial(processes.start_script, job, script=script)
        if self.start_method in ("fork", "forkserver"):
            _refuse_daemon(self.start_method)
        if self.start_method == "fork":
            _refuse_cuda()
            # Nothing is written: the fork inherits the function.
            return partial(processes.start_forked, job, call=call, interrupts=interrupts, watchdog=watchdog)
        try:
            rank.write_function(job.folder, call)
        except Exception as error:  # noqa: BLE001 - __reduce__ of any class may raise anything
            raise _pickle_error(call, self.start_method, error) from None
        if self.start_method == "spawn":
            return partial(processes.start_spawned, job)
        return partial(processes.start_served, job, interrupts=interrupts)

    def _supervise(
        self, job: Job, start: Callable[[int], RankProcess], interrupts: Interrupts, watchdog: Watchdog
    ) -> None:
        ranks: list[RankProcess] = []
        # Ranks of other machines, for which those of this one may wait, are not seen from here.
        is_limited = self.reruns_the_script and job.num_nodes == 1
        limit = self.hang_timeout.total_seconds() if self.hang_timeout is not None and is_limited else None
        supervisor = Supervisor(
            ranks,
            job.folder,
            world_size=job.world_size,
            spans_machines=job.num_nodes > 1,
            interrupts=interrupts,
            grace=self.grace,
            stop_grace=self.stop_grace,
            limit_before_launch=limit,
        )
        try:
            for local_rank in range(self.num_processes):
                ranks.append(start(local_rank))
                watchdog.guard(ranks[-1].pid)  # at once: this process may be killed before the next rank starts
        except BaseException as error:
            supervisor.end_all()
            if not isinstance(error, OSError):  # such as a signal
                raise
            # Too many processes, no memory, an unusable folder of temporary files.
            rank = f"local rank {len(ranks)} of {self.num_processes}"
            raise LaunchError(f"{rank} cannot be started: {error}{_hint(error)}") from None
        supervisor.run()

    def _result(self, job: Job) -> Any:
        """Return the result that rank 0 wrote; None on other machines."""
        if job.node_rank != 0:
            return None
        try:
            return read_payload(rank.result_file(job.folder))
        except FileNotFoundError:
            message = f"rank 0 of {job.world_size} exited with code 0 before the function had returned"
            raise RankFailedError(message, rank=0, exit_code=0) from None


def _stop_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get(_STOP_SECONDS, "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise RequestError(
            f"{_STOP_SECONDS}={text!r} is no number of seconds: set it to how long ranks may take to stop and "
            "save a checkpoint after a signal, such as 120, or unset it"
        )
    return seconds


def _pickle_error(call: partial[Any], start_method: str, error: Exception) -> LaunchError:
    objects = {
        "the function": call.func,
        **{f"argument {position}": argument for position, argument in enumerate(call.args)},
        **{f"argument {name!r}": argument for name, argument in call.keywords.items()},
    }
    return LaunchError(
        f"start_method={start_method!r} sends the function and its arguments to new processes, and "
        f"{describe_unpicklable(objects)} cannot be pickled ({error}): make it where it is used, define it at the "
        "top of a module, or choose start_method='fork' or 'popen'"
    )


def _refuse_daemon(start_method: str) -> None:
    if multiprocessing.current_process().daemon:
        raise LaunchError(
            f"start_method={start_method!r} cannot be used in a daemon process of multiprocessing, such as a worker of "
            "a Pool, of a DataLoader or of Celery's prefork pool, which may have no children of that kind: choose "
            "start_method='spawn', or train in the main process"
        )


def _refuse_cuda() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        raise LaunchError(
            "start_method='fork' cannot be used after CUDA has been initialized in this process, as copies of it "
            "cannot use CUDA: do nothing on a GPU before, or choose start_method='spawn' or 'popen'"
        )


def _hint(error: OSError) -> str:
    if "AF_UNIX" not in str(error):  # "AF_UNIX path too long", of the fork server
        return ""
    return ": the path of a socket in the folder of temporary files is too long; set TMPDIR to a shorter path"


# Uncaught failures, shown without the supervisor's stack


def show_without_stack(error: RankFailedError) -> None:
    """Install an excepthook that shows this error, if uncaught, by its message, which has the rank's traceback.

    With ``start_method="popen"`` the supervisor never gets past its first call of ``launch``, while a rank may have
    failed in a later one: the supervisor's stack would mislead.  The hook is removed with the error object.
    """
    previous_hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is failed():
            sys.stderr.write(f"{kind.__module__}.{kind.__qualname__}: {value}\n")
        else:
            previous_hook(kind, value, traceback)

    def restore(_: object) -> None:
        if sys.excepthook is show:  # else a later hook calls this one, and it may not be cut out
            sys.excepthook = previous_hook

    failed = weakref.ref(error, restore)
    sys.excepthook = show
