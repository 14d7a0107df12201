"""Choice of the launcher and of the number of processes."""

from __future__ import annotations

import inspect
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from dstrat.errors import ClusterError, ConflictError, RequestError
from dstrat.interfaces.accelerator import reason_against_fork
from dstrat.resolve.cluster import check_cluster
from dstrat.resolve.plan import PlanRow

if TYPE_CHECKING:
    from dstrat.interfaces.launcher import Launcher
    from dstrat.interfaces.strategy import Strategy
    from dstrat.launch.job import StartMethod
    from dstrat.resolve.compatibility import Constraints
    from dstrat.resolve.selection import Selection


StartedBy = Literal["nobody", "dstrat", "launcher", "cluster"]
"""Who starts the processes: nobody where this one is enough; a launcher is that of a plugin."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchSelection:
    """Who starts the processes of the job.

    Attributes:
        started_by: Who starts them.
        processes_per_node: Number of processes on each machine.
        world_size: Number of processes of the whole job.
        start_method: How dstrat starts those of this machine; None where it starts none.
        max_restarts: How often dstrat starts them again after a failure.
        reason: Why, a few words.
    """

    started_by: StartedBy
    processes_per_node: int
    world_size: int
    start_method: StartMethod | None = None
    max_restarts: int = 0
    reason: str

    @property
    def row(self) -> PlanRow:
        """The plan's line for it."""
        value = f"{self.world_size} by {self.start_method}" if self.start_method else str(self.world_size)
        return PlanRow(subject="processes", value=value, reason=self.reason)


def choose_launch(
    strategy: Selection[Strategy],
    constraints: Constraints,
    *,
    launcher: Selection[Launcher] | None = None,
    max_restarts: int = 0,
    elastic: bool | Literal["replace"] = False,
) -> LaunchSelection:
    """Choose who starts the processes.

    Args:
        strategy: The strategy.
        constraints: The other choices.
        launcher: The plugin that starts the processes; None without one.
        max_restarts: How often all ranks are to be started again after one of them has failed.
        elastic: Whether the others are to go on in their processes when one was killed; ``"replace"`` if a new one is
            to join.

    Raises:
        ClusterError: The environment contradicts the devices and machines, or itself.
        ConflictError: Processes are needed that the strategy cannot start, or that dstrat is to restart and cannot.
    """
    if elastic:
        _check_elastic(elastic, constraints, launcher, max_restarts)
    if launcher is not None:
        return _by_plugin(launcher, strategy, constraints)
    facts = strategy.facts
    if not facts.starts_processes and constraints.num_nodes == 1:
        if max_restarts:
            raise ConflictError(
                f"max_restarts={max_restarts} restarts processes that dstrat starts, and {strategy.title} runs in this "
                "one: choose a strategy that starts processes, such as strategy='ddp', or leave max_restarts out"
            )
        return LaunchSelection(
            started_by="nobody", processes_per_node=1, world_size=1, reason="the strategy needs no others"
        )
    per_node = constraints.num_devices if facts.starts_processes else 1
    check_cluster(constraints.cluster, processes_per_node=per_node, num_nodes=constraints.num_nodes)
    if constraints.cluster.instance.creates_processes_externally:
        return _external(per_node, constraints, max_restarts)
    return _local(strategy, per_node, constraints, max_restarts, elastic=elastic)


def _check_elastic(
    elastic: bool | Literal["replace"],
    constraints: Constraints,
    launcher: Selection[Launcher] | None,
    max_restarts: int,
) -> None:
    """Check that dstrat starts and supervises all processes of an elastic job.

    Raises:
        ConflictError: It does not.
    """
    if launcher is not None:
        raise ConflictError(
            f"elastic={elastic!r} needs the processes that dstrat starts, and {launcher.title} starts these: leave one "
            "of them out"
        )
    cluster = constraints.cluster.instance
    # Before max_restarts, which would be refused there too.
    if cluster.creates_processes_externally and cluster.restart_option is not None:
        raise ConflictError(
            f"elastic={elastic!r} needs the processes that dstrat starts, and {constraints.cluster.name} has started "
            f"these: leave elastic and max_restarts out, and use "
            f"{cluster.restart_option} with fit(resume='auto')"
        )
    if constraints.num_nodes > 1:
        raise ConflictError(
            f"elastic={elastic!r} works on one machine, and num_nodes={constraints.num_nodes}: leave elastic and "
            "max_restarts out, and start the script with torchrun --max-restarts=3, where fit(resume='auto') goes on "
            "from the checkpoints of InMemoryCheckpoint"
        )
    if not max_restarts:
        raise ConflictError(
            f"elastic={elastic!r} goes on after at most max_restarts deaths of ranks, and max_restarts=0: pass it too, "
            "such as max_restarts=3"
        )


def _by_plugin(
    launcher: Selection[Launcher], strategy: Selection[Strategy], constraints: Constraints
) -> LaunchSelection:
    if not strategy.facts.starts_processes:
        raise ConflictError(
            f"{launcher.title} starts processes, and {strategy.title} runs in one: choose a strategy that runs one "
            "process per device, such as strategy='ddp', or leave the launcher out"
        )
    if constraints.cluster.instance.creates_processes_externally:
        raise ConflictError(
            f"{launcher.title} starts processes, and {constraints.cluster.name} has started these "
            f"({constraints.cluster.reason}): leave the launcher out, or start the script once"
        )
    per_node = constraints.num_devices
    return LaunchSelection(
        started_by="launcher",
        processes_per_node=per_node,
        world_size=per_node * constraints.num_nodes,
        reason=f"one per device, by {launcher.name}",
    )


def _external(per_node: int, constraints: Constraints, max_restarts: int) -> LaunchSelection:
    option = constraints.cluster.instance.restart_option
    if max_restarts and option is not None:
        raise ConflictError(
            f"max_restarts={max_restarts} restarts processes that dstrat starts, and {constraints.cluster.name} has "
            f"started these: leave it out, and use {option} with fit(resume='auto')"
        )
    name, num_nodes = constraints.cluster.name, constraints.num_nodes
    if constraints.num_started != per_node * num_nodes:
        raise ClusterError(
            f"{name} started {constraints.num_started} processes, and {per_node} on each of num_nodes={num_nodes} "
            f"are needed: start {per_node * num_nodes}, or ask for devices='auto'"
        )
    return LaunchSelection(
        started_by="cluster",
        processes_per_node=per_node,
        world_size=per_node * num_nodes,
        reason=f"started already, says {name}",
    )


def _local(
    strategy: Selection[Strategy],
    per_node: int,
    constraints: Constraints,
    max_restarts: int,
    *,
    elastic: bool | Literal["replace"],
) -> LaunchSelection:
    world_size = per_node * constraints.num_nodes
    if max_restarts and constraints.num_nodes > 1:
        raise ConflictError(
            f"max_restarts={max_restarts} restarts the processes of one machine, and num_nodes="
            f"{constraints.num_nodes}: leave it out, and start the script with torchrun --max-restarts={max_restarts}"
        )
    if world_size == 1 and not max_restarts:  # otherwise it needs a supervisor
        return LaunchSelection(started_by="nobody", processes_per_node=1, world_size=1, reason="this one is enough")
    method = _start_method(strategy, world_size)
    reason = f"one per {'device' if per_node == constraints.num_devices else 'machine'}"
    if method == "popen" and constraints.test_runner is not None:
        # Running it again would run all tests again in each rank, and end this process after the first of them.
        # Forked processes cannot use a GPU where this one has done so.
        method = "fork" if reason_against_fork() is None else "spawn"
        reason += f"; {constraints.test_runner} runs this, and is no script to run again by 'popen'"
    if max_restarts:
        reason += f"; up to {max_restarts} restart{'s' if max_restarts > 1 else ''}"
    if elastic:
        reason += ", of the dead rank's peers in their processes"
    if elastic == "replace":
        reason += ", and with a new one"
    return LaunchSelection(
        started_by="dstrat",
        processes_per_node=per_node,
        world_size=world_size,
        start_method=method,
        max_restarts=max_restarts,
        reason=reason,
    )


def _start_method(strategy: Selection[Strategy], world_size: int) -> StartMethod:
    method = strategy.instance.start_method
    if method is None:
        raise ConflictError(
            f"{strategy.title} starts no processes, and {world_size} are needed: start them with torchrun, "
            "or with a scheduler"
        )
    from dstrat.launch.job import StartMethod  # slow to import; most plans need none

    methods: tuple[StartMethod, ...] = get_args(StartMethod)
    for start_method in methods:
        if method == start_method:
            return start_method
    raise RequestError(
        f"start_method {method!r} of {strategy.title} does not exist: choose one of {', '.join(methods)}"
    )


# Detection of a main module that cannot be run a second time: a notebook, a prompt, a worker, a test runner.


_INSTALLED = {"site-packages", "dist-packages"}  # names of the folders of installed packages
_RUNNERS = {"_pytest.": "pytest", "unittest.case": "unittest"}


def is_interactive() -> bool:
    """Return whether this is a notebook, a prompt, or the worker of another program.

    There is no script then that another process could run or import.
    """
    if hasattr(sys, "ps1") or "ipykernel" in sys.modules:
        return True
    main = sys.modules["__main__"]
    path = getattr(main, "__file__", None)  # "<stdin>" for a script from a pipe
    if path is None or not Path(path).is_file():
        return True
    # A file of an installed package is the worker of another program, as those of Ray are; it cannot be run once more.
    runs_a_module = getattr(main, "__spec__", None) is not None  # python -m
    return not runs_a_module and not _INSTALLED.isdisjoint(Path(path).parts)


def test_runner() -> str | None:
    """Return the runner of the test that calls this function, ``"pytest"`` or ``"unittest"``; None outside of tests."""
    # By the stack, not by sys.modules: a script that a test has started, or one that only imports pytest, is a script.
    frame = inspect.currentframe()  # traceback.walk_stack would resolve each frame's source
    name = None
    while frame is not None:
        module = frame.f_globals.get("__name__") or ""
        name = next((runner for prefix, runner in _RUNNERS.items() if module.startswith(prefix)), name)
        frame = frame.f_back
    return name
