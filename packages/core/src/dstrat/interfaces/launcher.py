"""The interface that starts the processes of a job."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")


class Launcher(ABC):
    """Runs a function once in every process of a job.

    Only :meth:`launch` must be overridden.  The smallest complete subclass, for processes that exist already::

        class InlineLauncher(Launcher):
            def launch(self, function, *args, **kwargs):
                return function(*args, **kwargs)

    The process of the user calls :meth:`receive`, then :meth:`launch` for each fit, validation, test or prediction.

    A strategy that overrides its property ``launcher`` is launched by the one that this returns, in a Trainer and in an
    own loop.  A package offers a launcher by an alias, ``Component(kind="launcher", ...)``, and a user asks for it with
    ``plugins="alias"``; what starts processes is then made of :class:`~dstrat.launch.task.RankTask`.

    Attributes:
        processes_per_node: Number of ranks on each machine.
        num_nodes: Number of machines.
    """

    processes_per_node: int = 1
    num_nodes: int = 1

    def receive(self, *, processes_per_node: int, num_nodes: int) -> None:
        """Receive the size of the job, which the plan decides; called before ``launch``."""
        self.processes_per_node, self.num_nodes = processes_per_node, num_nodes

    @property
    def runs_here(self) -> bool:
        """Whether ``launch`` runs the function in the calling process.

        If not, objects that the function changes are copies, and only its result is sent back.
        """
        return True

    @property
    def reruns_the_script(self) -> bool:
        """Whether the processes run the script again, so that ``launch`` does not return in this one."""
        return False

    @property
    def repeats_the_script(self) -> bool:
        """Whether this process re-runs the script and has not yet reached the launch that it was started for.

        Output that is printed once for the job is not printed by this process until then.
        """
        return False

    max_restarts: int = 0
    """How often it starts all processes again after one of them has failed."""

    @abstractmethod
    def launch(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        """Run the function in every process of the job and wait for all of them.

        Args:
            function: Sets up communication itself.  For another process, it and its arguments are pickled, see
                :func:`~dstrat.launch.task.dump_call`; tensors are copied.
            *args: Arguments of the function.
            **kwargs: Keyword arguments of the function.

        Returns:
            The result of the function in this process; if it did not run in this process, that of global rank 0.

        Raises:
            LaunchError: The processes could not be started.
            RankFailedError: A rank failed; all others have been ended.
        """
