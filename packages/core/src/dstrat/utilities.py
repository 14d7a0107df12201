"""Functions for modules, callbacks and scripts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat import (
        CombinedLoader,
        grad_norm,
        rank_zero_info,
        rank_zero_only,
        rank_zero_warn,
    )

__all__ = [
    "CombinedLoader",
    "grad_norm",
    "rank_zero_info",
    "rank_zero_only",
    "rank_zero_warn",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "dstrat"))
