"""Precision in which Colossal-AI computes in half, with its own loss scale and float32 weights in the optimizer."""

from __future__ import annotations

from typing import Any

import torch

from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.precision import Precision

_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}


class BoosterPrecision(Precision):
    """Computation in a half precision, to which the plugin converts the parameters.

    Args:
        flag: ``"16-mixed"`` or ``"bf16-mixed"``.
    """

    def __init__(self, flag: str) -> None:
        self.flag = flag
        self._dtype = _DTYPES[flag]

    @property
    def param_dtype(self) -> torch.dtype:
        return torch.float32  # of the master weights

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self._dtype

    def convert_input(self, batch: Any) -> Any:
        return apply_to_tensors(batch, lambda x: x.to(self._dtype) if x.is_floating_point() else x)
