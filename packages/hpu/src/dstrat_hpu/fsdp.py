"""Fully sharded data parallel training on Gaudi: the strategy of dstrat-fsdp over hccl."""

from __future__ import annotations

from typing import Any

from dstrat.plugins.catalog import get_catalog

# From the catalog rather than by an import: the record requires dstrat-fsdp, and what is offered as "fsdp" is its API.
_FSDPStrategy: Any = get_catalog().load(get_catalog().find("strategy", "fsdp@dstrat-fsdp"))


class HPUFSDPStrategy(_FSDPStrategy):  # type: ignore[misc]  # known when it is loaded
    """Training with torch's ``fully_shard`` over hccl, one process for each Gaudi.

    It takes the arguments of dstrat-fsdp's ``FSDPStrategy``.  hccl has no mean: the accelerator says so, and gradients
    are summed and then divided.
    """
