"""Profilers of the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat import (
        AdvancedProfiler,
        Profiler,
        SimpleProfiler,
        TorchProfiler,
    )

__all__ = [
    "AdvancedProfiler",
    "Profiler",
    "SimpleProfiler",
    "TorchProfiler",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "dstrat"))
