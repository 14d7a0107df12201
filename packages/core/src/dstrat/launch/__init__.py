"""Processes of a job: start them, watch them, and end all of them when one fails.

In the process of the user, which supervises the ranks of its machine and runs none of them:

    local          the launcher: a job, its attempts, the result
    job            settings, folder, port and environment of the job, and objects that its processes exchange
    command        the command line that runs the script once more
    processes      the start methods
    supervisor     waits, stops, ends; finds the failure that was first
    failures       classes of failures, and the error that names the primary one
    recovery       attempts of a job that is started again
    elastic        ranks that go on as fewer or more when one was killed or joins; files of both sides
    run_record     events of a run in its log folder, to which the supervisor adds a failure
    signals        signals that stop a job; the watchdog, a shell that ends the ranks of a killed supervisor

In each rank:

    bootstrap      the first module of a fresh interpreter
    fast_exit      the end of the process, without the teardown of the interpreter
    rank           set-up, function, result, files for the supervisor
    external       the launcher in a rank, and the record of earlier launches in a program
    progress       beats of a run, and idleness of processes; the supervisor reads both
    peer_watch     hang detection by ranks that no supervisor of ours watches, as under torchrun
    ended_peers    names of ranks that have ended, likewise
    task           a rank in a process that a plugin's launcher starts

``RankTask``, ``RankOutcome``, ``make_rank_tasks``, ``dump_call``, ``remove_job_folder`` and ``result_of_ranks`` are for
authors of launchers, and can be imported from here.

A rank and the supervisor exchange files in the job's folder, named by process id, because these outlive a rank that is
killed.  A failure gets its name when it is complete: the supervisor looks for new ones 50 times in a second.

A job ends in this order, so that the error names the cause, and no process stays:

1. A rank fails, hangs, or a signal arrives.
2. The supervisor waits a moment for a failure that came before, as peers often notice a failure first.
3. It reads the stacks of the ranks that still run, by SIGQUIT.
4. SIGTERM to these ranks, a grace period, SIGKILL to the process groups of all ranks.
5. The same for descendants that have left the groups.
6. The watchdog is killed, the folder removed, and the error raised.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.launch.task import RankOutcome as RankOutcome
    from dstrat.launch.task import RankTask as RankTask
    from dstrat.launch.task import dump_call as dump_call
    from dstrat.launch.task import make_rank_tasks as make_rank_tasks
    from dstrat.launch.task import remove_job_folder as remove_job_folder
    from dstrat.launch.task import result_of_ranks as result_of_ranks

_HOMES = dict.fromkeys(
    ("RankOutcome", "RankTask", "dump_call", "make_rank_tasks", "remove_job_folder", "result_of_ranks"),
    "dstrat.launch.task",
)

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
