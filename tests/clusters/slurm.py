"""A SLURM cluster of two nodes on this machine, whose daemons belong to a test run and end with it."""

from __future__ import annotations

import os
import platform
import re
import shutil
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from typing_extensions import Self

if TYPE_CHECKING:
    from pathlib import Path

INSTALL = "apt-get install slurm-wlm munge"
PROGRAMS = ("munged", "slurmctld", "slurmd", "srun", "sbatch", "scontrol")
NODES = ("n1", "n2")

_CONFIGURATION = """
ClusterName=dstrat
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=5
StateSaveLocation={folder}/state
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdSpoolDir={folder}/spool.%n
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdLogFile={folder}/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
SlurmdTimeout=20
KillWait=5
SlurmdParameters=config_overrides
MinJobAge=300
MpiDefault=none
{nodes}
PartitionName=test Nodes=n[1-2] Default=YES MaxTime=10:00 State=UP
"""


def missing_program() -> str | None:
    """Return why SLURM cannot run here, with the install command; None if it can."""
    missing = [name for name in PROGRAMS if find(name) is None]
    if missing:
        return f"SLURM's {missing[0]} is not installed: {INSTALL}"
    if os.geteuid() != 0:
        return "SLURM's daemons run jobs as their users, which needs root"
    return None


def find(program: str) -> str | None:
    return shutil.which(program, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")


class Slurm:
    """munged, slurmctld and a slurmd for each node; a context.

    Args:
        folder: An empty folder for the configuration, the state and the logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Self:
        ports = _free_ports(1 + len(NODES))
        nodes = [
            f"NodeName={name} NodeHostname={platform.node()} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for name, port in zip(NODES, ports[1:], strict=True)
        ]
        (self.folder / "slurm.conf").write_text(
            _CONFIGURATION.format(host=platform.node(), folder=self.folder, ports=ports, nodes="\n".join(nodes))
        )
        (self.folder / "state").mkdir()
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        self.folder.chmod(0o755)  # munged refuses a folder that others may write to
        try:
            self._start_munge(key)
            self._start("slurmctld", "-D", "-c")
            for name in NODES:
                self.start_node(name)
            self.wait_for_nodes(*NODES)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if "slurmctld" in self._daemons:
            self.run("scancel", "--user=root", "--signal=KILL", "--full", check=False)
            time.sleep(0.5)
        for daemon in reversed(self._daemons.values()):
            daemon.terminate()
        for daemon in self._daemons.values():
            _end(daemon)

    def _start_munge(self, key: Path) -> None:
        names = {"key-file": key, "socket": "munge.socket", "pid-file": "munge.pid", "log-file": "munge.log"}
        options = [f"--{name}={self.folder / path}" for name, path in names.items()]
        self._start("munged", "--foreground", "--force", f"--seed-file={self.folder / 'munge.seed'}", *options)
        _wait_for((self.folder / "munge.socket").exists, "munged has not opened its socket")

    def _start(self, program: str, *arguments: str, name: str = "") -> None:
        with (self.folder / f"{name or program}.out").open("ab") as output:
            self._daemons[name or program] = subprocess.Popen(
                [find(program), *arguments], env=self.environ, stdout=output, stderr=output, cwd=self.folder
            )

    def start_node(self, name: str) -> None:
        self._start("slurmd", "-D", "-N", name, name=name)

    def wait_for_nodes(self, *names: str) -> None:
        _wait_for(
            lambda: self.run("sinfo", "--noheader", "--format=%T", f"--nodes={','.join(names)}").split() == ["idle"],
            f"the nodes have not become idle, see the logs in {self.folder}",
        )

    def run(self, *command: str, check: bool = True, timeout: float = 300.0, **environ: str) -> str:
        """Run one of SLURM's programs, and return what it prints."""
        done = self.call(*command, timeout=timeout, **environ)
        assert not check or done.returncode == 0, (command, done.stdout, done.stderr)
        return done.stdout

    def call(
        self, *command: str, timeout: float = 300.0, cwd: Path | None = None, **environ: str
    ) -> subprocess.CompletedProcess[str]:
        """Run one of SLURM's programs to its end."""
        return subprocess.run(
            command,
            env={**self.environ, **environ},
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=cwd or self.folder,
        )

    def submit(self, script: Path, *options: str, **environ: str) -> str:
        """Submit a batch script, and return the number of the job."""
        done = self.call("sbatch", "--parsable", *options, str(script), cwd=script.parent, **environ)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def state(self, job: str) -> dict[str, str]:
        """Return the fields of a job that ``scontrol show job`` prints."""
        return dict(re.findall(r"(\w+)=(\S*)", self.run("scontrol", "show", "job", job)))

    def wait_for_state(self, job: str, *states: str, timeout: float = 300.0) -> dict[str, str]:
        _wait_for(
            lambda: self.state(job)["JobState"] in states,
            lambda: f"job {job} has not become {states}: {self.state(job)}",
            timeout,
        )
        return self.state(job)


def _end(daemon: subprocess.Popen[bytes]) -> None:
    try:
        daemon.wait(5)
    except subprocess.TimeoutExpired:
        daemon.kill()
        daemon.wait()


def _free_ports(count: int) -> list[int]:
    listening = [socket.socket() for _ in range(count)]
    for each in listening:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in listening]
    for each in listening:
        each.close()
    return ports


def _wait_for(condition: object, message: object, timeout: float = 300.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, message() if callable(message) else message
        time.sleep(0.1)
