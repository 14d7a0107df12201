"""Checking, when a process group opens, that all ranks see the same catalog."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from dstrat.errors import CatalogMismatchError

if TYPE_CHECKING:
    import torch.distributed as dist

    from dstrat.plugins.catalog import Catalog

_KEY = "catalog"


def check_same_catalog(catalog: Catalog, store: dist.Store, rank: int, world_size: int) -> None:
    """Compare this rank's catalog with that of rank 0, which waits until all others have read its own.

    Raises:
        CatalogMismatchError: They differ; the message names what only one of them has.
    """
    if rank == 0:
        store.set(_KEY, json.dumps(list(catalog.fingerprint_lines)))
        store.wait([f"{_KEY} read by {other}" for other in range(1, world_size)])
        return
    first = json.loads(store.get(_KEY))
    store.set(f"{_KEY} read by {rank}", "")
    mine = list(catalog.fingerprint_lines)
    if mine == first:
        return
    only_mine = sorted(set(mine) - set(first))
    only_first = sorted(set(first) - set(mine))
    raise CatalogMismatchError(
        f"rank {rank} and rank 0 see different plugins, so one alias could mean two things: "
        f"only rank {rank} has {only_mine or 'nothing more'}; only rank 0 has {only_first or 'nothing more'}. "
        "Install the same packages on every machine, or disable a plugin with DSTRAT_DISABLE_PLUGINS."
    )
