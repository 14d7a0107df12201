"""Loggers of the Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat import (
        CometLogger,
        CSVLogger,
        Logger,
        MLFlowLogger,
        TensorBoardLogger,
        WandbLogger,
    )

__all__ = [
    "CSVLogger",
    "CometLogger",
    "Logger",
    "MLFlowLogger",
    "TensorBoardLogger",
    "WandbLogger",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, dict.fromkeys(__all__, "dstrat"))
