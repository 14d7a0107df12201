"""Precision with one dtype for everything, under Lightning's name."""

from __future__ import annotations

from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import RequestError

_FLAGS = ("32-true", "16-true", "bf16-true")


class XLAPrecision(TruePrecision):
    """One dtype for parameters, computation and gradients on XLA devices.

    The module and its inputs are converted.  torch_xla has removed ``XLA_USE_BF16``, which did so in earlier versions.

    Args:
        precision: ``"32-true"``, ``"16-true"`` or ``"bf16-true"``; ``"bf16-mixed"`` is another class's.

    Raises:
        RequestError: It is another one.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _FLAGS:
            raise RequestError(f"XLAPrecision({precision!r}) is not possible: choose one of {', '.join(_FLAGS)}")
        super().__init__(precision)
