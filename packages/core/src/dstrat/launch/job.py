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
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.errors import LaunchError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


JOB_VARIABLE = "DSTRAT_JOB"
"""Names the job's folder; every process of a job has it, also those that a rank has started."""
PID_VARIABLE = "DSTRAT_RANK_PID"
"""The process id of the rank itself, set by it; its own children are not ranks."""
STORE_FILE = "store"
"""Name of the file in the job's folder through which its ranks meet, where all are on this machine."""
STOP_FILE = "stop"
"""Name of the file in the job's folder that holds the number of the signal by which it was asked to stop."""

LOOPBACK = "127.0.0.1"

_LAST_PORT = 65535
_PORT_CURE = "unset MASTER_PORT, and a free port is found, or choose another"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """The local part of a job.

    Attributes:
        folder: Where its processes leave files for each other.
        num_processes: Ranks on this machine.
        num_nodes: Machines.
        node_rank: This machine.
        address: Host name or address of the machine with rank 0.
        port: Where rank 0 listens, or may listen, where the ranks meet through a file.
        environ: What the user has set in the environment.
    """

    folder: Path
    num_processes: int
    num_nodes: int
    node_rank: int
    address: str
    port: int
    environ: Mapping[str, str]

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return self.num_processes * self.num_nodes

    def global_rank(self, local_rank: int) -> int:
        """Return the rank in the whole job."""
        return self.node_rank * self.num_processes + local_rank

    def rank_environment(self, local_rank: int) -> dict[str, str]:
        """Return a rank's whole environment: what the user has set, and what the job sets."""
        environ = {**os.environ, **self.environ}
        environ.pop(PID_VARIABLE, None)  # of the rank that this job may have been started by
        defaults = {"OMP_NUM_THREADS": str(threads_per_rank(self.num_processes))}
        if self.num_nodes == 1:
            defaults |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), _loopback_interface())
        return {**defaults, **environ, **self._rank_variables(local_rank)}

    def _rank_variables(self, local_rank: int) -> dict[str, str]:
        return {
            JOB_VARIABLE: str(self.folder),
            "RANK": str(self.global_rank(local_rank)),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(self.num_processes),
            "NODE_RANK": str(self.node_rank),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


@contextlib.contextmanager
def open_job(*, num_processes: int, num_nodes: int, environ: Mapping[str, str]) -> Iterator[Job]:
    """Make the folder and find the meeting point of a job; both are gone when the block ends.

    Raises:
        LaunchError: The port that ``MASTER_PORT`` asks for is none, or is taken.
    """
    nested = JOB_VARIABLE in environ  # then MASTER_PORT and the others are those of the rank that started us
    with contextlib.ExitStack() as stack:
        if num_nodes == 1:
            reserved = stack.enter_context(_reserve(0 if nested else _port(environ)))
            (address, port), node_rank = reserved.getsockname(), 0
        else:
            address, port, node_rank = environ["MASTER_ADDR"], _port(environ), int(environ["NODE_RANK"])
        folder = stack.enter_context(_locked_folder())
        yield Job(
            folder=folder,
            num_processes=num_processes,
            num_nodes=num_nodes,
            node_rank=node_rank,
            address=address,
            port=port,
            environ=environ,
        )


@contextlib.contextmanager
def _locked_folder() -> Iterator[Path]:
    """Make the folder of a job, where its files can be locked, as the ranks do that meet there.

    Raises:
        LaunchError: Neither the folder of temporary files nor shared memory has locks.
    """
    for parent in (tempfile.gettempdir(), "/dev/shm"):  # noqa: S108 - the folder is made for this user only
        try:
            folder = Path(tempfile.mkdtemp(prefix="dstrat-job-", dir=parent))
        except FileNotFoundError:  # not Linux
            continue
        try:
            locked = os.open(folder, os.O_RDONLY)
            try:
                # A cleaner of temporary files leaves locked folders alone, see tmpfiles.d(5).
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


def threads_per_rank(num_processes: int) -> int:
    """Return how many threads each rank may use so that together they fill the processors, and no more."""
    try:
        usable = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        usable = os.cpu_count() or 1
    return max(1, usable // num_processes)


def _port(environ: Mapping[str, str]) -> int:
    """Return the port that the user has set, 0 where there is none."""
    value = environ.get("MASTER_PORT", "0")
    if not re.fullmatch("[0-9]{1,5}", value) or int(value) > _LAST_PORT:
        raise LaunchError(f"MASTER_PORT is {value!r}, and must be a port, from 1 to {_LAST_PORT}: {_PORT_CURE}")
    return int(value)


def _reserve(port: int) -> socket.socket:
    """Hold a port of the loopback, without listening, so that no other program is given it; 0 takes any free one.

    The ranks meet through a file, and a script may still open a process group of its own by ``MASTER_PORT``, which
    torch and this socket can share (SO_REUSEADDR).
    """
    reserved = socket.socket()
    try:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((LOOPBACK, port))
    except OSError as error:
        reserved.close()
        reason = os.strerror(error.errno or 0)
        raise LaunchError(f"MASTER_PORT is {port}, and that port cannot be used ({reason}): {_PORT_CURE}") from None
    return reserved


def _loopback_interface() -> str:
    names = [name for _, name in socket.if_nameindex()]
    return next((name for name in ("lo", "lo0") if name in names), names[0])


# Sending objects between a job and its ranks through files.


_DEEPEST = 8


def write_payload(path: Path, payload: object) -> None:
    """Write an object for another process of the same job.

    Tensors are copied, never shared: ranks that share parameters on the CPU would train each other's.

    Raises:
        Exception: Whatever the object's own pickling raises.
    """
    torch = sys.modules.get("torch")
    with path.open("wb") as file:
        if torch is None:
            pickle.dump(payload, file, protocol=pickle.HIGHEST_PROTOCOL)
        else:  # keeps tensors that share memory together, and writes their bytes as they are
            torch.save(payload, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)


def read_payload(path: Path) -> Any:
    """Read what another process of the same job has written."""
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            import torch

            file.seek(0)
            return torch.load(file, weights_only=False)
        file.seek(0)
        return pickle.load(file)  # noqa: S301 - our own process wrote it into a folder that only we can read


def unpicklable_part(parts: Mapping[str, object]) -> str:
    """Return in words the innermost thing that cannot be pickled, such as ``module.loss (function)``.

    Args:
        parts: Objects by the names that the user has for them, one of which cannot be pickled.
    """
    path, found = "", None
    names: Iterable[tuple[str, object]] = parts.items()
    for _ in range(_DEEPEST):
        culprit = next(((name, part) for name, part in names if not _can_pickle(part)), None)
        if culprit is None:
            break
        path, found = path + culprit[0], culprit[1]
        names = _parts(found)
    return f"{path} ({type(found).__name__})"


def _parts(payload: object) -> Iterator[tuple[str, object]]:
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


def _can_pickle(part: object) -> bool:
    try:
        pickle.dumps(part)
    except Exception:  # noqa: BLE001 - __reduce__ and __getstate__ of any class may raise anything
        return False
    return True
