"""Names that Horovod 0.28 does not document: its rendezvous server, and the hooks of its optimizer."""

from __future__ import annotations

import contextlib
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping


class Rendezvous:
    """Horovod's rendezvous server at an address of our choice.

    ``horovod.runner.http.http_server.RendezvousServer`` listens on every interface, so that its keys can be read and
    written from other machines.

    Args:
        address: Address to listen on, such as ``"127.0.0.1"``.
        slots: The environment of each rank, see :func:`slot_environment`.

    Attributes:
        port: The port, a free one.
    """

    def __init__(self, address: str, slots: list[Mapping[str, str]]) -> None:
        from horovod.runner.common.util.hosts import SlotInfo
        from horovod.runner.http.http_server import RendezvousHandler, RendezvousHTTPServer

        names = ("HOSTNAME", "RANK", "LOCAL_RANK", "CROSS_RANK", "SIZE", "LOCAL_SIZE", "CROSS_SIZE")
        values = ([slot[f"HOROVOD_{name}"] for name in names] for slot in slots)
        self._server = RendezvousHTTPServer((address, 0), RendezvousHandler, 0)
        self._server.init([SlotInfo(host, *map(int, numbers)) for host, *numbers in values])
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, name="horovod-rendezvous", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def slot_environment(rank: int, world_size: int, num_local: int) -> dict[str, str]:
    """Return the variables that describe a rank to Horovod, whose ranks are counted machine by machine.

    Args:
        rank: The global rank.
        world_size: Number of ranks.
        num_local: Number of ranks on each machine.
    """
    node, local_rank = divmod(rank, num_local)
    numbers = {
        "RANK": rank,
        "SIZE": world_size,
        "LOCAL_RANK": local_rank,
        "LOCAL_SIZE": num_local,
        "CROSS_RANK": node,
        "CROSS_SIZE": world_size // num_local,
    }
    # Ranks with the same name count as being on one machine; it is not resolved.
    return {"HOROVOD_HOSTNAME": f"node-{node}", **{f"HOROVOD_{name}": str(value) for name, value in numbers.items()}}


def release_hooks(optimizer: Any) -> None:
    """Remove the hooks of a ``DistributedOptimizer`` from its parameters.

    Otherwise the next backward pass communicates, whatever it is for, and fails without Horovod.
    """
    optimizer._handles.clear()
    # A hook that still runs counts this down, and reduces at 0.
    optimizer._allreduce_delay = dict.fromkeys(optimizer._allreduce_delay, _NEVER)
    # The hooks are on these nodes of autograd, which end with the last reference to them.
    optimizer._grad_accs.clear()


_NEVER = 2**62  # more backward passes than any training has


@contextlib.contextmanager
def local_accumulation(optimizer: Any) -> Iterator[None]:
    """Let backward passes within a ``with`` block accumulate gradients without communication.

    Args:
        optimizer: A ``DistributedOptimizer`` of which no gradient is being reduced.
    """
    passes = optimizer.backward_passes_per_step
    optimizer.set_backward_passes_per_step(_NEVER)
    try:
        yield
    finally:
        optimizer.set_backward_passes_per_step(passes)
