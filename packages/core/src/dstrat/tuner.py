"""Searches for a learning rate and a batch size."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat import Tuner

__all__ = ["Tuner"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "dstrat"))
