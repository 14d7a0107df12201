"""Request of the user, before anything is resolved."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Accelerator, Devices
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """What should run, in the user's own words: each part as an alias, a class or an instance.

    Nothing is checked or rewritten here; :func:`~dstrat.resolve.make_plan` says what it means.

    Attributes:
        strategy: How the training is distributed.
        accelerator: The hardware; a group such as ``"gpu"`` takes the best member that is available.
        devices: Which devices of each machine, or how many.
        num_nodes: Number of machines.
        precision: The dtypes; None is ``"32-true"``.
        plugins: At most one each of Precision, ClusterEnvironment and CheckpointIO.
    """

    strategy: str | Strategy | type[Strategy] = "auto"
    accelerator: str | Accelerator | type[Accelerator] = "auto"
    devices: Devices = "auto"
    num_nodes: int = 1
    precision: str | int | Precision | type[Precision] | None = None
    plugins: tuple[Any, ...] = ()
