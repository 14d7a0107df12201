"""DiLoCo as a strategy for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from acme_diloco.strategy import DiLoCoStrategy

__all__ = ["DiLoCoStrategy"]


def __getattr__(name: str) -> Any:
    if name != "DiLoCoStrategy":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from acme_diloco.strategy import DiLoCoStrategy

    return DiLoCoStrategy
