"""Process group of a job, or its store alone: open, close, and check that all ranks have the same catalog."""

from __future__ import annotations

import contextlib
import hashlib
import ipaddress
import itertools
import json
import logging
import os
import signal
import socket
import struct
import sys
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Protocol

import torch.distributed as dist

from dstrat.errors import CatalogMismatchError, ClusterError, LaunchError
from dstrat.interfaces.cluster import this_machine
from dstrat.parallel.internals import abort_groups

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.plugins.catalog import Catalog


DEFAULT_TIMEOUT = timedelta(minutes=30)
"""Default timeout of a collective; another rank may be at work, such as rank 0 that prepares data."""
DEFAULT_HANG_TIMEOUT = timedelta(minutes=10)
"""Default time for which a rank may be idle."""

_OPENING = "come to open the process group"

_SIOCGIFADDR = 0x8915  # of Linux: the address of an interface

_log = logging.getLogger(__name__)
_SHORTEST_PAUSE = 0.001  # seconds between two looks into the store, at first

_stores: dict[object, dist.Store] = {}
_openings = itertools.count()
_timeouts: list[timedelta] = []  # of the open group, if any
_job_stores: list[dist.Store] = []  # likewise
_clusters: list[ClusterEnvironment] = []  # likewise
_channel_factories: list[Callable[[], Channel]] = []  # of a job that has joined without a process group


class Channel(Protocol):
    """Exchange of bytes among the ranks of a job, in any thread, independent of other channels."""

    def all_gather(self, message: bytes) -> list[bytes]:
        """Return the messages of all ranks, by rank, on each of them; collective."""


def open_process_group(cluster: ClusterEnvironment, *, backend: str, timeout: timedelta) -> dist.Store:
    """Open the default process group, or use the one that the user has opened already.

    When this returns, a group that it opened is open in all ranks, so any of them may close it.

    Args:
        cluster: The cluster environment, with the address of rank 0 and the rank of this process.
        backend: Name of the ``torch.distributed`` backend.
        timeout: How long a rank waits for the others, in this function and in each collective.

    Returns:
        The store that all ranks share, with a separate prefix for this group.

    Raises:
        ClusterError: The existing process group has another size or rank.
        LaunchError: Ranks timed out; the message names them.
    """
    import torch.distributed.nn  # noqa: F401 - its functions keep the group that is open when it is first imported

    store = _next_store(cluster, timeout)
    if dist.is_initialized():
        _check_existing(cluster)
    else:
        _meet(store, cluster, timeout, _OPENING)
        if "gloo" in backend:  # also in "cpu:gloo,cuda:nccl"
            _select_interface(cluster)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),  # torch's keys apart from ours
            rank=cluster.global_rank,
            world_size=cluster.world_size,
            timeout=timeout,
        )
        # Gloo fails in a rank that still connects when another one closes.
        _meet(store, cluster, timeout, "open the process group")
    _job_stores[:], _clusters[:] = [store], [cluster]
    return store


def join_job(cluster: ClusterEnvironment, *, timeout: timedelta, open_channel: Callable[[], Channel]) -> dist.Store:
    """Meet the other ranks without a process group, for a backend that communicates by itself; collective.

    Args:
        cluster: The cluster environment, with the address of rank 0 and the rank of this process.
        timeout: How long a rank waits for the others.
        open_channel: Returns a new channel; it is called as often and in the same order in every rank, after the
            backend has been started.

    Returns:
        The store that all ranks share, with a separate prefix.

    Raises:
        LaunchError: Ranks timed out; the message names them.
    """
    store = _next_store(cluster, timeout)
    _meet(store, cluster, timeout, _OPENING)
    _job_stores[:], _clusters[:], _channel_factories[:] = [store], [cluster], [open_channel]
    return store


def leave_job() -> None:
    """Forget the job that :func:`join_job` has joined, if any."""
    _job_stores.clear()
    _clusters.clear()
    _channel_factories.clear()


def channel_factory() -> Callable[[], Channel] | None:
    """Return what opens channels, if the job has no process group; otherwise None."""
    return _channel_factories[-1] if _channel_factories else None


def is_in_job() -> bool:
    """Return whether this process has opened a process group, or joined a job, which is still open."""
    return bool(_job_stores)


def rank_and_size() -> tuple[int, int]:
    """Return the rank of this process and the size of the open process group or joined job; 0 and 1 without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for cluster in _clusters:
        return cluster.global_rank, cluster.world_size
    return 0, 1


def wait_for_all_ranks(action: str) -> None:
    """Wait until all ranks of the open process group have called this; collective; return at once if none is open.

    It opens no connection, so it can follow the opening of further groups: Gloo fails, or hangs, in a rank that still
    connects when another one closes.

    Args:
        action: The completed action, for the message about a missing rank, such as "open the device mesh"; each name
            may be used once in a job.

    Raises:
        LaunchError: Ranks timed out; the message names them.
    """
    for store, cluster in zip(_job_stores, _clusters, strict=True):
        _meet(store, cluster, group_timeout(), action)


def clone_job_store(prefix: str, timeout: timedelta) -> dist.Store | None:
    """Return another connection to the store of the open process group, for a thread; None if none is open.

    Args:
        prefix: Prefix of its keys.
        timeout: Timeout of its operations.
    """
    stores = _job_stores[-1:]  # a copy, because another thread may clear the list
    if not stores:
        return None
    # A store serves one operation at a time, and a thread's would wait for those of the main thread.
    store = dist.PrefixStore(prefix, stores[0].clone())  # type: ignore[attr-defined]  # not in torch's stubs
    store.set_timeout(timeout)
    return store


def read_processes() -> dict[int, tuple[int, str]]:
    """Return the process id of each rank and its machine, from the store of the open process group.

    Empty if the user has opened the group.

    Raises:
        RuntimeError: What serves the store does not respond.
    """
    for store, cluster in zip(_job_stores, _clusters, strict=True):
        keys = [f"{rank} {_OPENING}" for rank in range(cluster.world_size)]
        if store.check(keys):
            texts = [value.decode().split(" ", 1) for value in store.multi_get(keys)]
            return {rank: (int(pid), machine) for rank, (pid, machine) in enumerate(texts)}
    return {}


def store_address() -> str | None:
    """Return the address at which rank 0 serves the store of the open process group; None if something else does."""
    for cluster in _clusters:
        if cluster.store_file is None and not cluster.store_is_served:
            return f"{cluster.main_address}:{cluster.main_port}"
    return None


def write_failure_report(text: str) -> None:
    """Write the failure of this rank into the store of the open process group, for ranks of other machines."""
    for store, cluster in zip(_job_stores, _clusters, strict=True):
        # Numbered, so that readers ask for what has been written, and not once for each rank.
        number = store.add("number of failures", 1)
        store.set(f"failure {number}", f"{cluster.global_rank} {text}")


def read_failure_reports() -> dict[int, str]:
    """Return what ranks have written about their failures, by rank.

    Raises:
        RuntimeError: The rank that serves the store does not respond.
    """
    reports: dict[int, str] = {}
    for store in _job_stores:
        keys = [f"failure {number + 1}" for number in range(store.add("number of failures", 0))]
        if keys and not store.check(keys):  # a rank has its number, and has not written yet
            keys = [key for key in keys if store.check([key])]
        texts = [value.decode().split(" ", 1) for value in store.multi_get(keys)] if keys else []
        reports.update((int(rank), text) for rank, text in texts)
    return reports


def group_timeout() -> timedelta:
    """Return the timeout of the job's process group, for further groups."""
    return _timeouts[-1] if _timeouts else DEFAULT_TIMEOUT


def close_process_group() -> None:
    """Close the default process group, if it is open; a peer that has ended already is no error."""
    leave_job()
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):  # the run is over, or has an error of its own to raise
            dist.destroy_process_group()


def abort_process_group() -> None:
    """Close the default process group without waiting for pending collectives."""
    # Closing waits for NCCL's collectives, which never end after a rank has ended; other backends fail by themselves.
    abort_groups()
    close_process_group()


def _next_store(cluster: ClusterEnvironment, timeout: timedelta) -> dist.Store:
    """Return the store of the job with the prefix of the next opening."""
    _timeouts[:] = [timeout]
    prefix = f"dstrat/{cluster.attempt}/{next(_openings)}"
    return dist.PrefixStore(prefix, _rendezvous(cluster, timeout))


def _rendezvous(cluster: ClusterEnvironment, timeout: timedelta) -> dist.Store:
    """Return the store of the job, which is opened once in a process; every process group uses a prefix of it."""
    key = cluster.store_file or (cluster.main_address, cluster.main_port)
    if key not in _stores:
        _stores[key] = _open_store(cluster, timeout)
    _stores[key].set_timeout(timeout)
    return _stores[key]


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
            wait_for_workers=False,  # _meet waits, and names missing ranks
            multi_tenant=True,  # shares the server with a group that the script opens at this port
            master_listen_fd=cluster.listening_socket,
        )
    except dist.DistNetworkError as error:
        if serves:  # such as a port that is in use, which torch's message names
            raise
        raise LaunchError(
            f"timed out waiting for rank 0 of {cluster.world_size}, which did not listen on "
            f"{cluster.main_address}:{cluster.main_port} within {timeout.total_seconds():g} s: {_HINT}"
        ) from error


_HINT = "see what it does, or give the strategy a longer timeout=timedelta(...)"


def _select_interface(cluster: ClusterEnvironment) -> None:
    """Let Gloo use the interface by which this machine reaches rank 0, where it would choose the loopback by itself.

    Gloo listens on the address of the host's name.  Many systems give it the loopback address in /etc/hosts, or none,
    and no other machine reaches that.
    """
    if "GLOO_SOCKET_IFNAME" in os.environ or sys.platform != "linux":
        return
    main = _ipv4_address(cluster.main_address)
    name = _ipv4_address(socket.gethostname())
    if main is None or main.is_loopback or not (name is None or name.is_loopback):
        return
    # Without a route to rank 0, opening the group tells so.
    with contextlib.suppress(OSError), socket.socket(type=socket.SOCK_DGRAM) as probe:
        probe.connect((str(main), cluster.main_port))  # sends nothing
        used = probe.getsockname()[0]
        for _, interface in socket.if_nameindex():
            if _interface_address(probe, interface) == used:
                _log.info("Gloo uses the interface %s, by which this machine reaches rank 0 at %s", interface, main)
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


def _meet(store: dist.Store, cluster: ClusterEnvironment, timeout: timedelta, action: str) -> None:
    """Wait until all ranks have called this.

    torch's own waiting neither names missing ranks nor returns when a signal arrives.

    Args:
        store: The store that the ranks share.
        cluster: The cluster environment, with the rank of this process.
        timeout: How long to wait.
        action: The completed action, for the message about missing ranks.

    Raises:
        LaunchError: Ranks timed out.
    """
    rank, size = cluster.global_rank, cluster.world_size
    all_came = f"all {action}"
    store.set(f"{rank} {action}", f"{os.getpid()} {this_machine()}")
    if store.add(f"number {action}", 1) == size:
        store.set(all_came, "")
    deadline, pause = time.monotonic() + timeout.total_seconds(), _SHORTEST_PAUSE
    longest = 0.01 + 1e-4 * size  # limits the requests to the store to 10,000 in a second
    while not store.check([all_came]):
        if (number := cluster.stop_signal) is not None:
            raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)
        if time.monotonic() > deadline:
            missing = [str(other) for other in range(size) if not store.check([f"{other} {action}"])]
            ranks = f"rank{'s' if len(missing) > 1 else ''} {', '.join(missing)}"
            raise LaunchError(
                f"timed out waiting for {ranks} of {size}, which did not {action} within "
                f"{timeout.total_seconds():g} s: {_HINT}"
            )
        time.sleep(pause)
        pause = min(2 * pause, longest)


def _check_existing(cluster: ClusterEnvironment) -> None:
    existing = (dist.get_rank(), dist.get_world_size())
    expected = (cluster.global_rank, cluster.world_size)
    if existing != expected:
        raise ClusterError(
            f"a process group is open already, with rank {existing[0]} of {existing[1]}, and the cluster environment "
            f"says rank {expected[0]} of {expected[1]}: close it with torch.distributed.destroy_process_group()"
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
