"""Process group of a job: open, close, and check that all ranks have the same catalog."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import json
import logging
import os
import socket
import struct
import sys
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from dstrat.errors import CatalogMismatchError, ClusterError, LaunchError, MisuseError
from dstrat.parallel.internals import abort_groups, collectives_of_all_ranks, uses_nccl
from dstrat.parallel.job import TIMEOUT_HINT, Job, current_job, set_current_job

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import torch

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.parallel.job import Channel
    from dstrat.plugins.catalog import Catalog


DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Default timeout of a collective; another rank may be at work, such as rank 0 that prepares data."""
DEFAULT_HANG_TIMEOUT = timedelta(minutes=10)
"""Default time for which a rank may be idle."""

_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface

_log = logging.getLogger(__name__)


@dataclass
class _Rendezvous:
    """The store of a job, which stays open as long as the process.

    Attributes:
        store: The store; each opening uses a prefix of it.
        num_openings: Number of openings, which every rank counts alike.
    """

    store: dist.Store
    num_openings: int = 0


_rendezvous: dict[object, _Rendezvous] = {}  # by address: a process may not listen on a port twice


def open_process_group(
    cluster: ClusterEnvironment, *, backend: str, timeout: timedelta, device: torch.device | None = None
) -> Job:
    """Open the default process group, or use the one that the user has opened already.

    When this returns, a group that it opened is open in all ranks, so any of them may close it.

    Args:
        cluster: The cluster environment, with the address of rank 0 and the rank of this process.
        backend: Name of the ``torch.distributed`` backend.
        timeout: How long a rank waits for the others, in this function and in each collective.
        device: The device of this rank.  With it NCCL connects here, and not in the first collective, and makes groups
            of some ranks from the connections that there are.

    Returns:
        The job: the store that all ranks share, with a separate prefix for this group.

    Raises:
        ClusterError: The existing process group has another size or rank.
        MisuseError: In the existing one a step has failed, and ranks have begun different collectives.
        LaunchError: Ranks timed out; the message names them.
    """
    import torch.distributed.nn  # noqa: F401 - its functions keep the group that is open when it is first imported

    job = _next_job(cluster, timeout)
    # For each backend: a checkpoint opens a Gloo group beside one of NCCL.
    select_interface(cluster.main_address, cluster.main_port)
    if dist.is_initialized():
        _check_existing(cluster)
        _check_failed_steps(job)
    else:
        job.wait_for_opening()
        if uses_nccl(backend):
            # After a failure the watchdog waits four times as long (ms) for its record of collectives, 60 s by default.
            os.environ.setdefault("TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "1000")
            # Messages between stages have groups of their own, as this warning advises.
            os.environ.setdefault("TORCH_NCCL_SHOW_EAGER_INIT_P2P_SERIALIZATION_WARNING", "false")
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", job),  # torch's keys apart from ours
            rank=cluster.global_rank,
            world_size=cluster.world_size,
            timeout=timeout,
            device_id=device if backend == "nccl" and device is not None and device.index is not None else None,
        )
        # Gloo fails in a rank that still connects when another one closes.
        job.wait_for_all_ranks("open the process group")
    set_current_job(job)
    return job


def join_job(cluster: ClusterEnvironment, *, timeout: timedelta, open_channel: Callable[[], Channel]) -> Job:
    """Meet the other ranks without a process group, for a backend that communicates by itself; collective.

    Args:
        cluster: The cluster environment, with the address of rank 0 and the rank of this process.
        timeout: How long a rank waits for the others.
        open_channel: Returns a new channel; it is called as often and in the same order in every rank, after the
            backend has been started.

    Returns:
        The job: the store that all ranks share, with a separate prefix.

    Raises:
        LaunchError: Ranks timed out; the message names them.
    """
    job = _next_job(cluster, timeout, open_channel)
    job.wait_for_opening()
    set_current_job(job)
    return job


def leave_job() -> None:
    """Forget the job of :func:`open_process_group` or :func:`join_job`, if any."""
    set_current_job(None)


def wait_for_all_ranks(action: str) -> None:
    """Wait until all ranks of the job have called this; collective; return at once without a job.

    It opens no connection, so it can follow the opening of further groups: Gloo fails, or hangs, in a rank that still
    connects when another one closes.

    Args:
        action: The completed action, for the message about a missing rank, such as "open the device mesh"; each name
            may be used once in a job.

    Raises:
        LaunchError: Ranks timed out; the message names them.
    """
    job = current_job()
    if job is not None:
        job.wait_for_all_ranks(action)


def close_process_group() -> None:
    """Leave the job, and close the default process group, whoever has opened it.

    A peer that has ended already is no error.
    """
    leave_job()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the run is over, or has an error of its own to raise
            dist.destroy_process_group()


def abort_process_group() -> None:
    """Close the default process group without waiting for pending collectives."""
    # Closing waits for NCCL's collectives, which never end after a rank has ended; other backends fail by themselves.
    abort_groups()
    close_process_group()


def _next_job(
    cluster: ClusterEnvironment, timeout: timedelta, open_channel: Callable[[], Channel] | None = None
) -> Job:
    """Return the job of the next opening of communication."""
    key = cluster.store_file or (cluster.main_address, cluster.main_port)
    if key not in _rendezvous:
        _rendezvous[key] = _Rendezvous(_open_store(cluster, timeout))
    rendezvous = _rendezvous[key]
    rendezvous.store.set_timeout(timeout)
    prefix = f"dstrat/{cluster.attempt}/{rendezvous.num_openings}"
    rendezvous.num_openings += 1
    return Job(rendezvous.store, prefix, cluster=cluster, timeout=timeout, open_channel=open_channel)


def _open_store(cluster: ClusterEnvironment, timeout: timedelta) -> dist.Store:
    if cluster.store_file is not None:
        return dist.FileStore(cluster.store_file)
    serves = cluster.global_rank == 0 and not cluster.store_is_served
    try:
        return dist.TCPStore(
            cluster.main_address,
            cluster.main_port,
            cluster.world_size,
            is_master=serves,
            timeout=timeout,
            wait_for_workers=False,  # the job waits, and names missing ranks
            multi_tenant=True,  # shares the server with a group that the script opens at this port
            master_listen_fd=cluster.listening_socket,
        )
    except dist.DistNetworkError as error:
        if serves:  # such as a port that is in use, which torch's message names
            raise
        raise LaunchError(
            f"timed out waiting for rank 0 of {cluster.world_size}, which did not listen on "
            f"{cluster.main_address}:{cluster.main_port} within {timeout.total_seconds():g} s: {TIMEOUT_HINT}"
        ) from error


def select_interface(address: str, port: int) -> None:
    """Let Gloo use the interface by which this machine reaches its peers, where it would choose the loopback by itself.

    Gloo listens on the address of the host's name.  Many systems give it the loopback address in /etc/hosts, or none,
    and no other machine reaches that.

    Args:
        address: Address of a peer, such as that of rank 0.
        port: A port there.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    main = _ipv4_address(address)
    name = _ipv4_address(socket.gethostname())
    if main is None or main.is_loopback or not (name is None or name.is_loopback):
        return
    # Without a route to the peer, opening the group tells so.
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((str(main), port))  # sends nothing
        used = probe.getsockname()[0]
        for _, interface in socket.if_nameindex():
            if _interface_address(probe, interface) == used:
                _log.info("Gloo uses the interface %s, by which this machine reaches %s", interface, main)
                os.environ["GLOO_SOCKET_IFNAME"] = interface  # stays, for groups that are opened later
                return


def _ipv4_address(host: str) -> ipaddress.IPv4Address | None:
    """Return the address of a host; None if its name does not resolve."""
    try:
        return ipaddress.IPv4Address(socket.gethostbyname(host))
    except (OSError, UnicodeError):
        return None


def _interface_address(probe: socket.socket, interface: str) -> str | None:
    """Return the IPv4 address of an interface; None if it has none."""
    import fcntl  # not on Windows

    request = struct.pack("256s", interface.encode())
    try:
        return socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24])
    except OSError:
        return None


def _check_existing(cluster: ClusterEnvironment) -> None:
    existing = (dist.get_rank(), dist.get_world_size())
    expected = (cluster.global_rank, cluster.world_size)
    if existing != expected:
        raise ClusterError(
            f"a process group is open already, with rank {existing[0]} of {existing[1]}, and the cluster environment "
            f"says rank {expected[0]} of {expected[1]}: close it with torch.distributed.destroy_process_group()"
        )


# Failed steps of a process group that further runs use


@contextlib.contextmanager
def noting_failed_steps(*, sends_messages: bool = False) -> Iterator[None]:
    """Note an error that leaves this context, in which ranks communicate, for the next run in their process group.

    Args:
        sends_messages: Whether ranks send messages to each other in it, which others may not have received then.
    """
    try:
        yield
    except BaseException as error:
        job = current_job()
        if job is not None:
            job.failed_step = job.failed_step or f"{type(error).__name__}: {error}"
            job.has_lost_messages |= sends_messages
        raise


def _check_failed_steps(job: Job) -> None:
    """Check that ranks have begun the same collectives, if a step has failed in this process group; collective.

    Otherwise a collective of the next run would meet one of the failed step: ranks would hang, or take its values.

    Args:
        job: The job of the next run.

    Raises:
        MisuseError: They have not.
    """
    earlier = current_job()
    if earlier is None:  # the user has opened the group, and no run has ended in it
        return
    rank, size = job.cluster.global_rank, job.cluster.world_size
    point = f"lost messages of rank {rank}" if earlier.has_lost_messages else f"begun {collectives_of_all_ranks()}"
    # Through the store, as collectives may not work.
    job.add(point, 1)
    if earlier.failed_step:
        job.set(f"failed step of {rank}", earlier.failed_step)
        job.add("number of failed steps", 1)
    job.wait_for_all_ranks("begin the next run")
    if not job.add("number of failed steps", 0) or job.add(point, 0) == size:
        return
    failed = [other for other in range(size) if job.check([f"failed step of {other}"])]
    error = job.get(f"failed step of {failed[0]}").decode()
    raise MisuseError(
        f"a step has failed in rank {failed[0]} of {size} ({error}), and ranks have left it at different points, so "
        "that what they send next would be taken for a part of that step: start the job again, from a checkpoint"
    )


# Check that all ranks have the same catalog


_DIGEST, _LINES = "digest of the catalog", "catalog"


def check_same_catalog(catalog: Catalog, store: dist.Store, rank: int, world_size: int) -> None:
    """Compare this rank's catalog with that of rank 0, which waits until all others have read it.

    Raises:
        CatalogMismatchError: They differ; the message names the differences.
    """
    if world_size == 1:
        return
    mine = list(catalog.fingerprint_lines)
    lines = json.dumps(mine)
    digest = hashlib.blake2b(lines.encode(), digest_size=16).hexdigest()
    if rank == 0:
        store.set(_LINES, lines)
        store.set(_DIGEST, digest)
        store.wait([f"{_DIGEST} read by all"])  # it may serve the store, which is gone when it fails
        return
    # A digest first: in a job of a thousand ranks, rank 0 would send megabytes to say that nothing differs.
    is_same = store.get(_DIGEST).decode() == digest
    first = mine if is_same else json.loads(store.get(_LINES))
    if store.add(f"{_DIGEST} read by", 1) == world_size - 1:
        store.set(f"{_DIGEST} read by all", "")
    if is_same:
        return
    only_mine = sorted(set(mine) - set(first))
    only_first = sorted(set(first) - set(mine))
    raise CatalogMismatchError(
        f"rank {rank} and rank 0 see different plugins, so an alias could mean different components: "
        f"only rank {rank} has {only_mine or 'nothing more'}; only rank 0 has {only_first or 'nothing more'}. "
        "Install the same packages on every machine, or disable a plugin with DSTRAT_DISABLE_PLUGINS."
    )
