"""Opening and closing the process group of a job."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING

import torch.distributed as dist

from dstrat.errors import ClusterError

if TYPE_CHECKING:
    from datetime import timedelta

    from dstrat.interfaces.cluster import ClusterEnvironment

_stores: dict[tuple[str, int], dist.Store] = {}
_openings = itertools.count()


def open_process_group(
    cluster: ClusterEnvironment, *, backend: str, timeout: timedelta, pg_options: object | None = None
) -> dist.Store:
    """Open the default process group, or join the one that the user has opened already.

    A group that is opened here is open in all ranks when this returns, so that any of them may close it.

    Args:
        cluster: Says where rank 0 listens, and which rank this is.
        backend: Name of the ``torch.distributed`` backend.
        timeout: How long a collective waits for the other ranks before it fails.
        pg_options: The backend's own options.

    Returns:
        The store that all ranks share, under a prefix of its own for this opening.

    Raises:
        ClusterError: The process group that exists already is of another size or rank.
    """
    import torch.distributed.nn  # noqa: F401 - its functions keep the group that is open when it is first imported

    prefix = f"dstrat/{cluster.attempt}/{next(_openings)}"
    store = dist.PrefixStore(prefix, _rendezvous(cluster, timeout))
    if dist.is_initialized():
        _check_existing(cluster)
    else:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", store),
            rank=cluster.global_rank,
            world_size=cluster.world_size,
            timeout=timeout,
            pg_options=pg_options,
        )
        _wait_for_all(store, cluster.world_size)
    return store


def close_process_group() -> None:
    """Close the default process group, if it is open; a peer that is gone already is no error."""
    if dist.is_initialized():
        with contextlib.suppress(RuntimeError):
            dist.destroy_process_group()


def abort_process_group() -> None:
    """Close the default process group without waiting for what is under way."""
    # Closing waits for NCCL's collectives, which never end when a rank is gone; other backends fail by themselves.
    abort = getattr(dist.distributed_c10d, "_abort_process_group", None)
    if abort is not None and dist.is_initialized() and dist.get_backend() == "nccl":
        abort()
    close_process_group()


def _rendezvous(cluster: ClusterEnvironment, timeout: timedelta) -> dist.Store:
    """Return the store of the job; it is opened once in a process, and every process group uses a prefix of it."""
    address = (cluster.main_address, cluster.main_port)
    if address not in _stores:
        _stores[address] = dist.TCPStore(
            *address,
            cluster.world_size,
            is_master=cluster.global_rank == 0 and not cluster.store_is_served,
            timeout=timeout,
            multi_tenant=True,
            master_listen_fd=cluster.listening_socket,
        )
    return _stores[address]


def _wait_for_all(store: dist.Store, world_size: int) -> None:
    """Wait until the group is open in all ranks: Gloo fails in a rank that still connects when another one closes."""
    if store.add("opened", 1) == world_size:
        store.set("opened by all", "")
    store.wait(["opened by all"])


def _check_existing(cluster: ClusterEnvironment) -> None:
    existing = (dist.get_rank(), dist.get_world_size())
    expected = (cluster.global_rank, cluster.world_size)
    if existing != expected:
        raise ClusterError(
            f"a process group is open already, with rank {existing[0]} of {existing[1]}, and the cluster environment "
            f"says rank {expected[0]} of {expected[1]}: close it with torch.distributed.destroy_process_group()"
        )
