"""Launcher that starts and supervises the ranks of this machine."""

from __future__ import annotations

import multiprocessing
import sys
import weakref
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, cast

from dstrat.errors import LaunchError, RankFailedError
from dstrat.interfaces.accelerator import reason_against_fork
from dstrat.interfaces.launcher import Launcher
from dstrat.launch import command, external, processes, rank
from dstrat.launch.elastic import Regrouping
from dstrat.launch.fast_exit import leave_quickly_if_uncaught
from dstrat.launch.job import JobSettings, LocalJob, describe_unpicklable, open_job, read_payload
from dstrat.launch.recovery import Recovery, path_exists, wait_for_restart
from dstrat.launch.run_record import record_failure
from dstrat.launch.signals import Interrupts, Watchdog, stop_signals
from dstrat.launch.supervisor import Supervisor

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import TracebackType

    from dstrat.launch.processes import RankProcess
    from dstrat.launch.recovery import FailedAttempt

T = TypeVar("T")


class LocalLauncher(Launcher):
    """Starts one process per local rank, and supervises them from the calling process.

    The calling process runs no rank itself, so it survives the failure of any.  A rank that raises, dies or hangs
    ends the job, and the error names it.  With ``"popen"`` the ranks run the user's script once more, and ``launch``
    never returns here: it raises ``SystemExit(0)`` when the script has ended in all ranks.

    Args:
        settings: Settings of the jobs; by default those of ``options``.
        **options: Fields of :class:`~dstrat.launch.job.JobSettings`.

    Attributes:
        failed_attempts: The attempts of the last launch that have failed.

    Raises:
        RequestError: There is no such start method, or the environment has no number of seconds.
    """

    def __init__(self, settings: JobSettings | None = None, **options: Any) -> None:
        self.settings = settings or JobSettings(**options)
        self.max_restarts = self.settings.max_restarts
        self.failed_attempts: list[FailedAttempt] = []

    def __getstate__(self) -> dict[str, Any]:
        # os.environ itself cannot be pickled.
        return {**self.__dict__, "settings": replace(self.settings, environ=dict(self.settings.environ))}

    @property
    def runs_here(self) -> bool:
        return False

    @property
    def reruns_the_script(self) -> bool:
        return self.settings.start_method == "popen"

    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        launch = external.history.begin_launch()
        try:
            return cast("T", self._launch(partial(function, *args, **kwargs)))
        except BaseException as error:
            external.history.record_failure(launch, error)  # ranks of later launches raise it again on their way
            if isinstance(error, LaunchError | KeyboardInterrupt):
                error.with_traceback(None)  # a user has no use for the supervisor's frames
            if isinstance(error, RankFailedError) and self.reruns_the_script:
                show_without_stack(error)
            leave_quickly_if_uncaught(has_peers=False)  # it has no peers: it runs no rank, and they have ended
            raise

    def _launch(self, call: partial[T]) -> Any:
        settings = self.settings
        recovery = Recovery(settings.max_restarts, settings.recovers_checkpoint or path_exists)
        self.failed_attempts = recovery.failed
        signals = stop_signals(includes_preemption=settings.preemption_deadline is not None)
        with Interrupts(signals) as interrupts:  # first: a signal before the watchdog would leak the folder
            while True:
                job_context = open_job(
                    num_processes=settings.num_processes,
                    num_nodes=settings.num_nodes,
                    environ=settings.environ,
                    restart_count=len(recovery.failed),
                    reaches_other_jobs=settings.reaches_other_jobs,
                )
                with job_context as job, Watchdog(job.folder) as watchdog:
                    recovery.begin_attempt(job.folder)
                    start = self._prepare(job.folder, call, interrupts, watchdog)
                    try:
                        regrouping = None
                        if settings.elastic:
                            newcomers = replace(job, starts_newcomers=True)
                            start_newcomer = partial(start, newcomers) if settings.elastic == "replace" else None
                            regrouping = Regrouping(job.folder, recovery, watchdog, start_newcomer)
                        self._supervise(job, partial(start, job), interrupts, watchdog, regrouping)
                    except RankFailedError as error:
                        record_failure(job.folder, error)
                        seconds = recovery.end_attempt(job.folder, error)
                    else:
                        recovery.end()
                        interrupts.restore()  # from here on a signal acts at once, also while a large result is read
                        if self.reruns_the_script:
                            raise SystemExit(0)  # the ranks have run the rest of the script
                        return self._result(job)
                wait_for_restart(seconds, interrupts)  # when nothing of the attempt is left

    def _prepare(
        self, folder: Path, call: partial[T], interrupts: Interrupts, watchdog: Watchdog
    ) -> Callable[[LocalJob, int], RankProcess]:
        """Do everything that can fail before a process is started, and return the function that starts a local rank."""
        method = self.settings.start_method
        if method == "popen":
            script = command.rerun_command(sys.orig_argv, sys.argv, sys.modules["__main__"])
            external.history.save(folder)
            return partial(processes.start_script, script=script)
        if method in ("fork", "forkserver"):
            _refuse_daemon(method)
        if method == "fork":
            _refuse_fork()
            # Nothing is written: the fork inherits the function.
            return partial(processes.start_forked, call=call, interrupts=interrupts, watchdog=watchdog)
        try:
            rank.write_function(folder, call)
        except Exception as error:  # noqa: BLE001 - __reduce__ of any class may raise anything
            raise _pickle_error(call, method, error) from None
        if method == "spawn":
            return processes.start_spawned
        return partial(processes.start_served, interrupts=interrupts)

    def _supervise(
        self,
        job: LocalJob,
        start: Callable[[int], RankProcess],
        interrupts: Interrupts,
        watchdog: Watchdog,
        regrouping: Regrouping | None,
    ) -> None:
        ranks: list[RankProcess] = []
        supervisor = Supervisor(ranks, job, self.settings, interrupts, regrouping)
        try:
            for local_rank in range(job.num_processes):
                ranks.append(start(local_rank))
                watchdog.guard(ranks[-1].pid)  # at once: this process may be killed before the next rank starts
        except BaseException as error:
            supervisor.end_all()
            if not isinstance(error, OSError):  # such as a signal
                raise
            # Too many processes, no memory, an unusable folder of temporary files.
            rank = f"local rank {len(ranks)} of {job.num_processes}"
            raise LaunchError(f"{rank} cannot be started: {error}{_hint(error)}") from None
        supervisor.run()

    def _result(self, job: LocalJob) -> Any:
        """Return the result that rank 0 wrote; None on other machines."""
        if job.node_rank != 0:
            return None
        try:
            return read_payload(rank.result_file(job.folder))
        except FileNotFoundError:
            message = f"rank 0 of {job.world_size} exited with code 0 before the function had returned"
            raise RankFailedError(message, rank=0, exit_code=0) from None


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


def _refuse_fork() -> None:
    reason = reason_against_fork()
    if reason is not None:
        raise LaunchError(
            f"start_method='fork' cannot be used after {reason}: do nothing on a GPU before, compute no gradients "
            "beside one, or choose start_method='spawn' or 'popen'"
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
