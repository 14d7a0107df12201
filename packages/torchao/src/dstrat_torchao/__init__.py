"""Precisions of torchao and of NVIDIA's Transformer Engine for dstrat; importing it brings in no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat_torchao.float8 import Float8Precision
    from dstrat_torchao.quantized_weights import QuantizedWeightsPrecision
    from dstrat_torchao.transformer_engine import TransformerEnginePrecision

__all__ = ["Float8Precision", "QuantizedWeightsPrecision", "TransformerEnginePrecision"]

_HOMES = {
    "Float8Precision": "dstrat_torchao.float8",
    "QuantizedWeightsPrecision": "dstrat_torchao.quantized_weights",
    "TransformerEnginePrecision": "dstrat_torchao.transformer_engine",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
