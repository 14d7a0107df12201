"""The precision in which DeepSpeed scales the loss."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dstrat.builtin.precision.true import default_dtype
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.precision import Precision

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch.nn import Module


class DeepSpeedHalfPrecision(Precision):
    """Parameters and computation in float16, with master weights in float32.

    DeepSpeed has the master weights, and scales the loss.
    """

    flag = "16-mixed"
    param_dtype = compute_dtype = reduce_dtype = torch.float16

    def connect(self, module: Module) -> Module:
        return module.half()

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype(torch.float16)

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()

    def convert_input(self, batch: Any) -> Any:
        return apply_to_tensors(batch, lambda tensor: tensor.half() if tensor.is_floating_point() else tensor)
