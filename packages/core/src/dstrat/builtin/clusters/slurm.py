"""Cluster environment of tasks that SLURM's srun started."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
from typing import TYPE_CHECKING

from dstrat.builtin.clusters.environ import port_of_job
from dstrat.builtin.clusters.external import ExternalEnvironment, RankNames
from dstrat.errors import ClusterError, RequestError

if TYPE_CHECKING:
    from collections.abc import Mapping


_REQUEUE_SIGNALS = (signal.SIGUSR1, signal.SIGTERM, signal.SIGHUP)
_REQUEUE_SECONDS = (
    60.0  # slurmctld may be busy; srun kills a rank that takes longer than KillWait only after the requeue
)
_SHELL_NAMES = ("bash", "interactive")
_REMEDY = "put srun before python, or choose the cluster environment 'local' to start processes on this machine only"


class SLURMEnvironment(ExternalEnvironment):
    """One task of a step that srun started.

    A shell of salloc or ``srun --pty`` is no such task: dstrat starts the processes there.  A batch script with several
    tasks that starts python without srun is an error.

    With ``auto_requeue`` a job that reaches its time limit continues in the next one: SLURM announces the limit by a
    signal (``#SBATCH --signal=USR1@90``), ``Trainer(preemption_deadline=90)`` saves a checkpoint, rank 0 calls
    ``scontrol requeue``, and ``fit(resume="auto")`` resumes from the checkpoint.

    Args:
        environ: The environment variables; ``os.environ`` by default.
        auto_requeue: Whether the job is queued again after the signal.
        requeue_signal: That signal: SIGUSR1, SIGTERM or SIGHUP; SIGUSR1 by default.

    Raises:
        RequestError: The signal is another one, or there is one without ``auto_requeue``.
    """

    names = RankNames(
        world_size="SLURM_NTASKS", global_rank="SLURM_PROCID", local_rank="SLURM_LOCALID", node_rank="SLURM_NODEID"
    )
    hint = "start the script with srun"

    restart_option = "sbatch --requeue"

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        auto_requeue: bool = False,
        requeue_signal: signal.Signals | int | None = None,
    ) -> None:
        super().__init__(environ)
        if requeue_signal is not None and not auto_requeue:
            raise RequestError(
                f"requeue_signal={requeue_signal!r} has no effect: add auto_requeue=True, or leave it out"
            )
        if requeue_signal not in (None, *_REQUEUE_SIGNALS):
            possible = ", ".join(each.name for each in _REQUEUE_SIGNALS)
            raise RequestError(f"requeue_signal={requeue_signal!r} does not stop a job: choose one of {possible}")
        self.auto_requeue = auto_requeue
        self._requeue_signal = int(requeue_signal or signal.SIGUSR1)

    @classmethod
    def evidence(cls, environ: Mapping[str, str]) -> str | None:
        if _is_shell(environ):
            return None
        if "SLURM_STEP_ID" in environ:
            return "SLURM_STEP_ID is set"
        return "SLURM_NTASKS is set in a batch script" if environ.get("SLURM_NTASKS", "1") != "1" else None

    def start_command(self, *, num_devices: int, num_nodes: int) -> str:
        return f"srun --nodes={num_nodes} --ntasks-per-node={num_devices}"

    @property
    def main_address(self) -> str:
        if self.environ.get("MASTER_ADDR"):
            return self.environ["MASTER_ADDR"]
        if self._num_nodes == 1:  # the name of a node need not resolve, not even on itself
            return "127.0.0.1"
        return self._reachable(first_host(self._nodelist))

    @property
    def main_port(self) -> int:
        if "MASTER_PORT" in self.environ:
            return self.variables.port()
        return port_of_job(self.variables.text("SLURM_JOB_ID"), self.variables.text("SLURM_STEP_ID"))

    @property
    def _num_nodes(self) -> int:
        return self.variables.integer("SLURM_NNODES", minimum=1)

    @property
    def _nodelist(self) -> str:
        # A step may run on some of the job's nodes only.
        return self.environ.get("SLURM_STEP_NODELIST") or self.variables.text("SLURM_JOB_NODELIST")

    @property
    def attempt(self) -> int:
        name = "SLURM_RESTART_COUNT"  # not set before the first restart
        return self.variables.integer(name) if name in self.environ else 0

    @property
    def job_id(self) -> str | None:
        number = self.environ.get("SLURM_JOB_ID")
        return f"slurm-{number}" if number else None

    @property
    def requeue_signal(self) -> int | None:
        return self._requeue_signal if self.auto_requeue else None

    def requeue(self) -> None:
        job = self.variables.text("SLURM_JOB_ID")
        if "SLURM_ARRAY_JOB_ID" in self.environ:
            # The last task of an array has the array's own number as SLURM_JOB_ID, which would requeue all tasks.
            job = f"{self.environ['SLURM_ARRAY_JOB_ID']}_{self.variables.text('SLURM_ARRAY_TASK_ID')}"
        try:
            done = subprocess.run(  # noqa: S603 - the job's number is SLURM's
                ["scontrol", "requeue", job],  # noqa: S607 - where PATH finds it
                env=dict(self.environ),
                capture_output=True,
                text=True,
                timeout=_REQUEUE_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ClusterError(f"job {job} is not queued again: {error}; submit it again with sbatch") from error
        if done.returncode != 0:
            raise ClusterError(
                f"job {job} is not queued again, as scontrol requeue says {done.stderr.strip()!r}: submit it again, "
                "with sbatch --requeue where jobs of this cluster are not queued again by default"
            )

    def validate(self, *, num_devices: int, num_nodes: int) -> None:
        if "SLURM_STEP_ID" not in self.environ:
            raise ClusterError(
                f"SLURM_STEP_ID is not set, so this process is none of the job's tasks "
                f"(SLURM_NTASKS is {self.environ.get('SLURM_NTASKS')!r}): {_REMEDY}"
            )
        if _is_shell(self.environ):
            raise ClusterError(
                f"this is an interactive shell of SLURM (SLURM_JOB_NAME is {self.environ.get('SLURM_JOB_NAME')!r}) "
                f"and none of the job's tasks: {_REMEDY}"
            )
        super().validate(num_devices=num_devices, num_nodes=num_nodes)

    def check_address(self) -> None:
        _ = self.main_port
        if self._num_nodes > 1 and not self.environ.get("MASTER_ADDR"):
            first_host(self._nodelist)  # parsed only: the name is resolved when it is used, not for a plan

    def _check_sizes(self, num_devices: int, num_nodes: int) -> None:
        super()._check_sizes(num_devices, num_nodes)
        tasks = self.environ.get("SLURM_STEP_TASKS_PER_NODE", str(num_devices))  # such as "2(x3),1"
        counts = {re.sub(r"\(x[0-9]+\)$", "", count) for count in tasks.split(",")}
        for name, running, fits in (
            ("SLURM_NNODES", self._num_nodes, self._num_nodes == num_nodes),
            ("SLURM_STEP_TASKS_PER_NODE", tasks, counts == {str(num_devices)}),
        ):
            if not fits:
                raise ClusterError(
                    f"{name} is {running}, and devices={num_devices} with num_nodes={num_nodes} are requested: "
                    f"start with {self.start_command(num_devices=num_devices, num_nodes=num_nodes)}"
                )

    def _reachable(self, host: str) -> str:
        """Return the host, or if its name does not resolve, the address of a batch script that runs on it."""
        if _resolves(host):
            return host
        # The machine on which srun was started: of a batch script the job's first node, of salloc perhaps a login node.
        address = self.environ.get("SLURM_LAUNCH_NODE_IPADDR")
        is_batch_script = self.environ.get("ENVIRONMENT") == "BATCH"
        if address and is_batch_script and first_host(self.variables.text("SLURM_JOB_NODELIST")) == host:
            return address
        raise ClusterError(
            f"SLURM names {host!r} as the machine of rank 0, and this machine finds no address of that name: "
            "set MASTER_ADDR to the machine's address"
        )


def _is_shell(environ: Mapping[str, str]) -> bool:
    """Return whether this process was started in an interactive shell of salloc or ``srun --pty``.

    Tasks that such a shell starts with srun inherit its name and terminal, but there are several of them.  A batch
    script has a rank, and a shell of salloc has none.
    """
    has_shell_name = environ.get("SLURM_JOB_NAME") in _SHELL_NAMES
    if "SLURM_STEP_ID" not in environ:
        return has_shell_name or "SLURM_PROCID" not in environ
    num_tasks = environ.get("SLURM_STEP_NUM_TASKS", environ.get("SLURM_NTASKS"))
    return num_tasks == "1" and (has_shell_name or "SLURM_PTY_PORT" in environ)


def _resolves(host: str) -> bool:
    try:
        socket.getaddrinfo(host, None)
    except (OSError, UnicodeError):  # an empty or overlong label is a UnicodeError
        return False
    return True


# SLURM's compressed lists of hosts, such as ``"n[01-03,7],gpu5"``


_FIRST_HOST = re.compile(r"(?:[^\s,\[\]]|\[[^\s\[\]]*\])+(?=,|\Z)")
_BRACKETS = re.compile(r"\[([0-9]+)(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\]")


def first_host(nodelist: str) -> str:
    """Return the first host of a list.

    Raises:
        ClusterError: It is not such a list.
    """
    first = _FIRST_HOST.match(nodelist)
    host = _BRACKETS.sub(r"\1", first.group()) if first else ""
    if not host or "[" in host:
        raise ClusterError(
            f"SLURM's list of nodes is {nodelist!r}, which does not begin with a host: "
            "set MASTER_ADDR to the machine of rank 0"
        )
    return host
