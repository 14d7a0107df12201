"""Job on this machine: its folder, its rendezvous, the environment and the payload of each rank."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
import time
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal, get_args

from dstrat.errors import LaunchError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping
    from datetime import timedelta


JOB_VARIABLE = "DSTRAT_JOB"
"""Path of the job's folder, in the environment of every process of a job, including children of ranks."""
PID_VARIABLE = "DSTRAT_RANK_PID"
"""Process id of the rank, set by it: its children inherit the environment and are not ranks."""
RESTART_VARIABLE = "DSTRAT_RESTART_COUNT"
"""Number of restarts before this attempt of the job, in the environment of its ranks."""
STARTED_VARIABLE = "DSTRAT_NUM_STARTED"
"""Number of ranks that were started, in the environment of a rank of an elastic job whose peers have died."""
GROUP_VARIABLE = "DSTRAT_GROUP"
"""Number of groups before that of this rank, in the environment of a rank of an elastic job whose peers have died."""
NEWCOMER_VARIABLE = "DSTRAT_NEWCOMER"
"""Set in the environment of a process that waits to take the place of a rank that has died."""
STORE_FILE = "store"
"""Name of the rendezvous file in the job's folder, if all ranks are on this machine; numbered after regroupings."""
REGROUP_FILE = "regroup"
"""Name, before the number of a group, of the file in the job's folder that makes its ranks regroup."""
STOP_FILE = "stop"
"""Name of the file in the job's folder with the number of the signal that stops the job."""

LOOPBACK = "127.0.0.1"

_LAST_PORT = 65535
_PORT_HINT = "unset MASTER_PORT to use a free port, or choose another"


StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


@dataclass(frozen=True, kw_only=True, slots=True)
class JobSettings:
    """Settings of the jobs that a launcher starts on this machine.

    Attributes:
        num_processes: Number of ranks on this machine.
        start_method: ``"popen"`` runs the script once more in each rank.  The others run only the function:
            ``"spawn"`` in fresh interpreters, ``"forkserver"`` in copies of a process that has loaded torch, and
            ``"fork"`` in copies of this one, where each is limited to one thread.
        num_nodes: Number of machines; with more than one, the user starts the script on each, with ``MASTER_ADDR``,
            ``MASTER_PORT`` and ``NODE_RANK`` in the environment.
        environ: The user's environment, which the ranks inherit.
        grace: Seconds between SIGTERM and SIGKILL for a rank that is ended.
        stop_grace: Seconds for all ranks to stop after their current step, after the first SIGINT, SIGTERM or SIGHUP.
            None takes ``preemption_deadline``, and without one ``DSTRAT_STOP_SECONDS`` of the environment, 30 by
            default.
        max_restarts: How often all ranks are started again after one of them has failed.
        elastic: Whether ranks go on in their processes, as fewer ranks, when one of them was killed; with ``"replace"``
            a new process joins them.
        recovers_checkpoint: Returns whether a checkpoint is complete, by its path and number of optimizer steps, so
            that an attempt can continue from it; called after an attempt has failed.  None looks for its path.
        hang_timeout: How long a rank may be idle before it has come to its launch, where ranks run the script; None
            for any time.
        preemption_deadline: Seconds within which a scheduler ends the job after SIGTERM or SIGUSR1, which all ranks
            have to stop then; None leaves SIGUSR1 to the program.
        reaches_other_jobs: Whether its ranks communicate with other jobs, which may be on other machines.

    Raises:
        RequestError: There is no such start method, or the environment has no number of seconds.
    """

    num_processes: int
    start_method: StartMethod = "popen"
    num_nodes: int = 1
    environ: Mapping[str, str] = field(default_factory=lambda: os.environ)
    grace: float = 1.5
    stop_grace: float | None = None
    max_restarts: int = 0
    elastic: bool | Literal["replace"] = False
    recovers_checkpoint: Callable[[str, int], bool] | None = None
    hang_timeout: timedelta | None = None
    preemption_deadline: float | None = None
    reaches_other_jobs: bool = False

    def __post_init__(self) -> None:
        if self.start_method not in get_args(StartMethod):
            raise RequestError(f"start_method {self.start_method!r} is not one of {', '.join(get_args(StartMethod))}")
        if self.stop_grace is None and self.preemption_deadline is None:
            _stop_seconds(self.environ)  # raises here, and not when a signal has arrived

    @property
    def stop_seconds(self) -> float:
        """Seconds for all ranks to stop after a signal."""
        seconds = self.preemption_deadline if self.stop_grace is None else self.stop_grace
        return _stop_seconds(self.environ) if seconds is None else seconds


_STOP_SECONDS = "DSTRAT_STOP_SECONDS"


def _stop_seconds(environ: Mapping[str, str]) -> float:
    text = environ.get(_STOP_SECONDS, "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not seconds > 0:
        raise RequestError(
            f"{_STOP_SECONDS} needs a number of seconds, not {text!r}: set it to how long ranks may take to stop and "
            "save a checkpoint after a signal, such as 120, or unset it"
        )
    return seconds


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalJob:
    """A job on this machine.

    Attributes:
        folder: Folder for the files that its processes exchange.
        num_processes: Number of ranks on this machine.
        num_nodes: Number of machines.
        node_rank: Index of this machine.
        address: Host name or address of the machine with rank 0.
        port: Port on which rank 0 listens; reserved and unused if the ranks meet through a file.
        environ: The user's environment.
        restart_count: Number of attempts before this one.
        reaches_other_jobs: Whether its ranks communicate with other jobs, which may be on other machines.
        starts_newcomers: Whether processes that are started now wait to take the places of ranks that have died.
    """

    folder: Path
    num_processes: int
    num_nodes: int
    node_rank: int
    address: str
    port: int
    environ: Mapping[str, str]
    restart_count: int = 0
    reaches_other_jobs: bool = False
    starts_newcomers: bool = False

    @property
    def world_size(self) -> int:
        """Number of ranks on all machines."""
        return self.num_processes * self.num_nodes

    def global_rank(self, local_rank: int) -> int:
        """Return the global rank of a local rank."""
        return self.node_rank * self.num_processes + local_rank

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Return the environment of a rank: the user's, and the variables of the job."""
        environ = {**os.environ, **self.environ}  # that of the job may be a part, such as a dictionary in a test
        # Of the rank that started this job, in a nested job.
        for name in (PID_VARIABLE, STARTED_VARIABLE, GROUP_VARIABLE, NEWCOMER_VARIABLE):
            environ.pop(name, None)
        if self.starts_newcomers:
            environ[NEWCOMER_VARIABLE] = "1"
        defaults = {"OMP_NUM_THREADS": str(threads_per_rank(self.num_processes))}
        if (
            self.num_nodes == 1 and not self.reaches_other_jobs
        ):  # nothing of the job listens on an interface that other machines reach
            defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback_interface())
        if self.num_nodes > 1:
            # Otherwise ranks of other machines learn of a failure when their collective times out.
            defaults["TORCH_NCCL_PROPAGATE_ERROR"] = "1"
        return {
            **defaults,
            **environ,  # what the user has set wins over the defaults
            JOB_VARIABLE: str(self.folder),
            "RANK": str(self.global_rank(local_rank)),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_processes),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
            RESTART_VARIABLE: str(self.restart_count),
        }


@contextlib.contextmanager
def open_job(
    *,
    num_processes: int,
    num_nodes: int,
    environ: Mapping[str, str],
    restart_count: int = 0,
    reaches_other_jobs: bool = False,
) -> Iterator[LocalJob]:
    """Create the folder and reserve the port of a job; both are released when the block ends.

    Raises:
        LaunchError: ``MASTER_PORT`` is not a port, or is in use.
    """
    nested = JOB_VARIABLE in environ  # then MASTER_PORT is that of the rank that starts this job
    with contextlib.ExitStack() as stack:
        if num_nodes == 1:
            reserved = stack.enter_context(_reserve(0 if nested else _port(environ)))
            (address, port), node_rank = reserved.getsockname(), 0
        else:
            address, port, node_rank = environ["MASTER_ADDR"], _port(environ), int(environ["NODE_RANK"])
        folder = stack.enter_context(_locked_folder())
        yield LocalJob(
            folder=folder,
            num_processes=num_processes,
            num_nodes=num_nodes,
            node_rank=node_rank,
            address=address,
            port=port,
            environ=environ,
            restart_count=restart_count,
            reaches_other_jobs=reaches_other_jobs,
        )


@contextlib.contextmanager
def _locked_folder() -> Iterator[Path]:
    """Create the folder of a job, on a file system with locks, which the rendezvous through a file needs.

    Raises:
        LaunchError: Neither the folder of temporary files nor shared memory supports locks.
    """
    for parent in (tempfile.gettempdir(), "/dev/shm"):  # noqa: S108 - the folder is made for this user only
        _remove_stale_folders(Path(parent))
        try:
            folder = Path(tempfile.mkdtemp(prefix="dstrat-job-", dir=parent))
        except FileNotFoundError:  # no /dev/shm: not Linux
            continue
        try:
            locked = os.open(folder, os.O_RDONLY)
            try:
                # Cleaners of temporary files skip locked folders, see tmpfiles.d(5).
                fcntl.flock(locked, fcntl.LOCK_SH)
            except OSError:  # some file systems of clusters
                continue
            else:
                yield folder
                return
            finally:
                os.close(locked)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    raise LaunchError(
        f"the folder of temporary files, {tempfile.gettempdir()!r}, is on a file system whose files cannot be locked "
        "(flock): set TMPDIR to a folder of this machine"
    )


_STALE_SECONDS = 3600.0  # much longer than a job takes to lock its new folder


def _remove_stale_folders(parent: Path) -> None:
    """Remove this user's folders of jobs whose supervisor and watchdog were both killed: nobody holds their lock."""
    for folder in parent.glob("dstrat-job-*"):
        with contextlib.suppress(OSError):  # locked, removed meanwhile, a link, or another user's
            descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                status = os.fstat(descriptor)
                if status.st_uid == os.getuid() and time.time() - status.st_mtime > _STALE_SECONDS:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def threads_per_rank(num_processes: int) -> int:
    """Return the number of threads for each rank, so that all ranks together have one per processor."""
    return max(1, usable_processors() // num_processes)


def usable_processors() -> int:
    """Return the number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        return os.cpu_count() or 1


def _port(environ: Mapping[str, str]) -> int:
    """Return the port that the user has set, 0 if none."""
    value = environ.get("MASTER_PORT", "0")
    if not re.fullmatch("[0-9]{1,5}", value) or int(value) > _LAST_PORT:
        raise LaunchError(f"MASTER_PORT is {value!r}, and must be a port, from 1 to {_LAST_PORT}: {_PORT_HINT}")
    return int(value)


def _reserve(port: int) -> socket.socket:
    """Bind a loopback port, without listening, so that no other program gets it; 0 for any free one.

    The ranks meet through a file.  A script may still open another process group with ``MASTER_PORT``, which torch
    and this socket can share (SO_REUSEADDR).
    """
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOOPBACK, port))
    except OSError as error:
        reserved.close()
        reason = os.strerror(error.errno or 0)
        raise LaunchError(f"MASTER_PORT is {port}, and that port cannot be used ({reason}): {_PORT_HINT}") from None
    return reserved


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


# Objects exchanged between a job and its ranks, through files


_MAX_DEPTH = 8


def write_payload(path: Path | BytesIO, payload: object) -> None:
    """Write an object for another process of the same job.

    Tensors are copied, never shared: ranks that shared parameters on the CPU would overwrite each other's.

    Args:
        path: A file, or a buffer in memory.
        payload: The object.

    Raises:
        Exception: Any error of the object's pickling.
    """
    torch = sys.modules.get("torch")
    with path.open("wb") if isinstance(path, Path) else contextlib.nullcontext(path) as file:
        if torch is None:
            pickle.dump(payload, file, protocol=pickle.HIGHEST_PROTOCOL)
        else:  # preserves shared storages, and writes their bytes without a copy
            torch.save(payload, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)


def read_payload(path: Path) -> Any:
    """Read an object that another process of the same job has written."""
    with path.open("rb") as file:
        return _read(file)


def load_payload(content: bytes) -> Any:
    """Return an object that another process of the same job has written to a buffer."""
    return _read(BytesIO(content))


def _read(file: IO[bytes]) -> Any:
    is_archive = file.read(2) == b"PK"  # of torch.save
    file.seek(0)
    if is_archive:
        import torch

        # On the CPU: each process has a device of its own, and the one that launched the job uses none.
        return torch.load(file, map_location="cpu", weights_only=False)
    return pickle.load(file)  # noqa: S301 - our own process wrote it into a folder that only we can read


def describe_unpicklable(objects: Mapping[str, object], dumps: Callable[[Any], bytes] = pickle.dumps) -> str:
    """Return a description of the innermost object that cannot be pickled, such as ``module.loss (function)``.

    Args:
        objects: Objects by the names that users know, at least one of which cannot be pickled.
        dumps: The pickler that was used.
    """
    path, innermost = "", None
    children: Iterable[tuple[str, object]] = objects.items()
    for _ in range(_MAX_DEPTH):  # an object may contain itself
        failing = next(((name, child) for name, child in children if not _can_pickle(child, dumps)), None)
        if failing is None:
            break
        path, innermost = path + failing[0], failing[1]
        children = _children_of(innermost)
    return f"{path} ({type(innermost).__name__})"


def _children_of(payload: object) -> Iterator[tuple[str, object]]:
    if isinstance(payload, dict):
        yield from ((f"[{key!r}]", value) for key, value in payload.items())
    elif isinstance(payload, list | tuple | set | frozenset):
        yield from ((f"[{position}]", value) for position, value in enumerate(payload))
    elif dataclasses.is_dataclass(payload):  # which may have slots
        yield from ((f".{field.name}", getattr(payload, field.name)) for field in dataclasses.fields(payload))
    elif hasattr(payload, "__self__") and hasattr(payload, "__func__"):
        yield ".__self__", payload.__self__
    else:
        yield from ((f".{key}", value) for key, value in getattr(payload, "__dict__", {}).items())


def _can_pickle(payload: object, dumps: Callable[[Any], bytes]) -> bool:
    try:
        dumps(payload)
    except Exception:  # noqa: BLE001 - __reduce__ and __getstate__ of any class may raise anything
        return False
    return True
