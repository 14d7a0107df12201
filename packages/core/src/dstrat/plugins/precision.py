"""Precision plugins: base classes, the core's classes, and those of installed plugins."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.builtin.precision.mixed import MixedPrecision as MixedPrecision
    from dstrat.builtin.precision.true import TruePrecision as TruePrecision
    from dstrat.interfaces.precision import Precision as Precision

    def __getattr__(name: str) -> Any: ...  # a class of an installed plugin


_HOMES = {
    "MixedPrecision": "dstrat.builtin.precision.mixed",
    "Precision": "dstrat.interfaces.precision",
    "TruePrecision": "dstrat.builtin.precision.true",
}

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES, ("precision",))
