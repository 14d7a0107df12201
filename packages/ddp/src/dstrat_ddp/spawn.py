"""DistributedDataParallel in processes that are started with spawn."""

from __future__ import annotations

from typing import Any

from dstrat_ddp.strategy import DDPStrategy


class DDPSpawnStrategy(DDPStrategy):
    """DDPStrategy whose processes are started with ``spawn``, unless ``start_method`` says otherwise.

    What the module and the callbacks refer to must pickle, and the script needs a ``__main__`` guard.

    Args:
        *args: As for DDPStrategy.
        start_method: ``"spawn"``, ``"fork"`` or ``"forkserver"``.
        **kwargs: As for DDPStrategy.
    """

    def __init__(self, *args: Any, start_method: str = "spawn", **kwargs: Any) -> None:
        super().__init__(*args, **{"start_method": start_method, **kwargs})
