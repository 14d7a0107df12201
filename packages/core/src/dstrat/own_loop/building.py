"""From what a user asks for to a strategy that is ready to be launched."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.resolve import Request, make_plan
from dstrat.resolve import build as build_plan

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Devices
    from dstrat.interfaces.strategy import Strategy


def build(
    *,
    strategy: Any = "auto",
    accelerator: Any = "auto",
    devices: Devices = "auto",
    num_nodes: int = 1,
    precision: Any = None,
    plugins: Any = None,
) -> Strategy:
    """Return the strategy with all its parts, as a Trainer that is asked for the same would use it.

    No device is touched and no process started: :class:`~dstrat.OwnLoop` launches it.

    Args:
        strategy: How training is distributed: by alias (``"ddp"``, ``"auto"`` ...) or as a Strategy.
        accelerator: Hardware by alias (``"cpu"``, ``"gpu"``, ``"auto"`` ...) or as an Accelerator.
        devices: How many devices of each machine, or which: ``4``, ``"4"``, ``[0, 1]``, ``"0,1"``, ``-1``, ``"auto"``.
        num_nodes: Number of machines.
        precision: ``"32-true"``, ``"bf16-mixed"``, ``"16-mixed"`` ...
        plugins: Parts of one's own, one or a list: a Precision, a ClusterEnvironment, a CheckpointIO; one of each kind.

    Raises:
        DstratError: The request cannot be done as asked; the message says what is possible.
    """
    request = Request(
        strategy=strategy,
        accelerator=accelerator,
        devices=devices,
        num_nodes=num_nodes,
        precision=precision,
        plugins=() if plugins is None else tuple(plugins) if isinstance(plugins, list | tuple) else (plugins,),
    )
    return build_plan(make_plan(request), request)
