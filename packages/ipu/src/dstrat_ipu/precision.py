"""Precision with one dtype for everything, under Lightning's name."""

from __future__ import annotations

from dstrat.builtin.precision.true import TruePrecision
from dstrat.errors import RequestError

_FLAGS = ("32-true", "16-true")  # IPUs have no bfloat16


class IPUPrecision(TruePrecision):
    """One dtype for parameters, computation and inputs on IPUs.

    With ``"16-true"`` the module and its inputs are float16; poptorch keeps the optimizer's state in float32.  Small
    gradients become zero without a loss scale, which only poptorch's optimizers have:
    ``poptorch.optim.AdamW(..., loss_scaling=1024.0)``.

    Args:
        precision: ``"32-true"`` or ``"16-true"``.

    Raises:
        RequestError: It is another one.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _FLAGS:
            raise RequestError(f"IPUPrecision({precision!r}) is not possible: choose one of {', '.join(_FLAGS)}")
        super().__init__(precision)
