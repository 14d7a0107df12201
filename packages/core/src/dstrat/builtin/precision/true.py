"""Precision with one dtype for everything."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import RequestError
from dstrat.interfaces.batch import apply_to_tensors
from dstrat.interfaces.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor
    from torch.nn import Module

_DTYPES = {
    "64-true": torch.float64,
    "32-true": torch.float32,
    "bf16-true": torch.bfloat16,
    "16-true": torch.float16,
}


class TruePrecision(Precision):
    """One dtype for parameters, computation, gradients and their reduction.

    ``"32-true"`` changes nothing, because float32 is torch's default.  The others convert the module and its inputs,
    and make their dtype the default inside steps.  ``"16-true"`` has no loss scaling: small gradients become zero, so
    most trainings need ``"16-mixed"`` or ``"bf16-true"`` instead.

    Args:
        precision: ``"64-true"``, ``"32-true"``, ``"bf16-true"`` or ``"16-true"``.
    """

    def __init__(self, precision: str = "32-true") -> None:
        if precision not in _DTYPES:
            raise RequestError(f"TruePrecision({precision!r}) is not possible: choose one of {', '.join(_DTYPES)}")
        self.flag = precision
        self._converts = precision != "32-true"

    @property
    def param_dtype(self) -> torch.dtype:
        return _DTYPES[self.flag]

    compute_dtype = reduce_dtype = param_dtype

    def connect(self, module: Module) -> Module:
        if self._converts:
            # Unlike module.to(dtype), these leave complex tensors as they are.
            convert = {torch.float64: module.double, torch.float16: module.half, torch.bfloat16: module.bfloat16}
            convert[self.param_dtype]()
        return module

    def tensor_init_context(self) -> AbstractContextManager[Any]:
        return default_dtype(self.param_dtype) if self._converts else nullcontext()

    def forward_context(self) -> AbstractContextManager[Any]:
        return self.tensor_init_context()  # for tensors that a step makes, such as masks and noise

    def convert_input(self, batch: Any) -> Any:
        return apply_to_tensors(batch, self._converted) if self._converts else batch

    def _converted(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.compute_dtype) if tensor.is_floating_point() else tensor


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Make this dtype the default of new floating-point tensors within the context."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
