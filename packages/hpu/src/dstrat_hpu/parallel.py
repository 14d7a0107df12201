"""DistributedDataParallel on Gaudi: the strategy of dstrat-ddp over hccl."""

from __future__ import annotations

from typing import Any

from dstrat.plugins.catalog import get_catalog

# From the catalog rather than by an import: the record requires dstrat-ddp, and what is offered as "ddp" is its API.
_DDPStrategy: Any = get_catalog().load(get_catalog().find("strategy", "ddp@dstrat-ddp"))


class HPUParallelStrategy(_DDPStrategy):  # type: ignore[misc]  # known when it is loaded
    """Training with torch's DistributedDataParallel over hccl, one process for each Gaudi.

    It takes the arguments of dstrat-ddp's ``DDPStrategy``, keywords of DistributedDataParallel among them.  hccl has
    no mean: gradients are divided by the number of processes, and summed.
    """

    @property
    def device_ids(self) -> list[int] | None:
        """None: DistributedDataParallel takes the device of the parameters, as the vendor's guide has it."""
        return None
