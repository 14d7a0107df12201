"""Precision in which Colossal-AI computes in half, with its own loss scale and float32 weights in the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.precision import Precision

if TYPE_CHECKING:
    from torch import Tensor

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
        return torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self._dtype

    def convert_input(self, batch: Any) -> Any:
        return apply_to_tensors(batch, self._halved)

    def _halved(self, tensor: Tensor) -> Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor
