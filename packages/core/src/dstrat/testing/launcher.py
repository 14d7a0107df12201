"""The suite for launchers."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.errors import LaunchError, RankFailedError
from dstrat.launch.progress import has_ended
from dstrat.plugins.catalog import get_catalog
from dstrat.testing.plugin import check_light, check_record
from dstrat.testing.suite import Suite, fail, standard

if TYPE_CHECKING:
    from dstrat.interfaces.launcher import Launcher

_RANKS = 2
_SECONDS = 30.0  # for the processes of a job to be gone


class LauncherSuite(Suite):
    """Standard tests of a launcher that starts processes on this machine, two of them."""

    kind = "launcher"

    @standard("basic", "record")
    def test_its_plugin_is_light_to_import(self) -> None:
        check_light(self.offer)

    @standard("basic", "record")
    def test_its_record_is_complete_and_true(self) -> None:
        check_record(self.offer)

    @standard("processes", "life cycle")
    def test_each_rank_is_a_process_that_knows_its_rank(self, tmp_path: Path) -> None:
        result = self._launcher.launch(note_rank, str(tmp_path))
        if result != ("rank 0", 1.5):
            fail(f"launch() returned {result!r}", expected="the result of the function in global rank 0.")
        facts = [path.read_text().split() for path in sorted(tmp_path.iterdir())]
        if [fact[1:] for fact in facts] != [[str(rank), str(_RANKS), str(rank), "0"] for rank in range(_RANKS)]:
            fail(
                f"the ranks are described by {[fact[1:] for fact in facts]} (rank, world size, local rank, node rank)",
                fix="call a RankTask of dstrat in each process.",
            )
        if len({os.getpid(), *(int(fact[0]) for fact in facts)}) != _RANKS + 1:
            fail("the function did not run in one process for each rank")
        self._check_gone(tmp_path)

    @standard("processes", "life cycle")
    def test_it_launches_again(self, tmp_path: Path) -> None:
        launcher = self._launcher
        for folder in (tmp_path / "first", tmp_path / "second"):
            folder.mkdir()
            launcher.launch(note_rank, str(folder))
            if len(list(folder.iterdir())) != _RANKS:
                fail(f"the {folder.name} launch ran {len(list(folder.iterdir()))} ranks of {_RANKS}")

    @standard("processes", "failures")
    def test_failing_rank_is_named_with_its_traceback(self, tmp_path: Path) -> None:
        error = self._failure(raise_in_rank_1, tmp_path)
        if error.rank != 1 or "no sample in raise_in_rank_1" not in error.rank_traceback:
            fail(
                f"rank 1 raised, and the error names rank {error.rank}: {error}",
                expected="a RankFailedError with the rank and its traceback; result_of_ranks raises it.",
            )
        self._check_gone(tmp_path)

    @standard("processes", "failures")
    def test_killed_rank_is_named(self, tmp_path: Path) -> None:
        error = self._failure(kill_rank_1, tmp_path)
        if error.rank != 1:
            fail(f"rank 1 was killed, and the error names rank {error.rank}: {error}")
        self._check_gone(tmp_path)

    @property
    def _launcher(self) -> Launcher:
        launcher: Launcher = get_catalog().load(self.offer)(**{**self.component.options, **self.options})
        launcher.receive(processes_per_node=_RANKS, num_nodes=1)
        return launcher

    def _failure(self, function: Any, folder: Path) -> RankFailedError:
        try:
            self._launcher.launch(function, str(folder))
        except RankFailedError as error:
            return error
        except LaunchError as error:
            fail(f"a rank failed, and launch() raised {error!r}", expected="a RankFailedError.")
        return fail("a rank failed, and launch() returned", expected="a RankFailedError.")

    def _check_gone(self, folder: Path) -> None:
        """Check that no rank is left, each of which has written its process id first."""
        pids = [int(path.read_text().split()[0]) for path in folder.iterdir()]
        deadline = time.monotonic() + _SECONDS
        while remaining := [pid for pid in pids if not has_ended(pid)]:
            if time.monotonic() > deadline:
                fail(
                    f"{len(remaining)} of {_RANKS} ranks are alive {_SECONDS:g} s after the end of the job",
                    fix="end all processes when launch() returns or raises.",
                )
            time.sleep(0.05)


# Functions of the ranks, which other processes import by their names


def note_rank(folder: str) -> tuple[str, float]:
    """Write how this process is described, and return a value."""
    cluster = LocalEnvironment()
    facts = (os.getpid(), cluster.global_rank, cluster.world_size, cluster.local_rank, cluster.node_rank)
    Path(folder, f"rank-{cluster.global_rank}").write_text(" ".join(map(str, facts)))
    return f"rank {cluster.global_rank}", 1.5


def raise_in_rank_1(folder: str) -> None:
    """Raise in rank 1; the other one returns."""
    name, _ = note_rank(folder)
    if name == "rank 1":
        raise ValueError("no sample in raise_in_rank_1")


def kill_rank_1(folder: str) -> None:
    """Die in rank 1, by SIGKILL; the other one returns."""
    name, _ = note_rank(folder)
    if name == "rank 1":
        os.kill(os.getpid(), signal.SIGKILL)
