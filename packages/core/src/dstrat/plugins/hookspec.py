"""The hook that a plugin implements, and the marker it uses for that."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pluggy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.plugins.component import Component, Tombstone

API_VERSION = "v1"
ENTRY_POINT_GROUP = f"dstrat.{API_VERSION}"

hookspec = pluggy.HookspecMarker("dstrat")
hookimpl = pluggy.HookimplMarker("dstrat")


@hookspec
def dstrat_components() -> Sequence[Component | Tombstone]:
    """Return the components that this plugin offers, and the aliases that it has retired.

    Called once per process.  The module that implements it must not import torch or a backend.
    """
    raise NotImplementedError  # a specification is never called
