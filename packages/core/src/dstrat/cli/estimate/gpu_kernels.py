"""Operations that save other tensors on GPUs than on the CPU, on which a fake step runs."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from dstrat.interfaces.batch import apply_to_tensors

if TYPE_CHECKING:
    from dstrat.interfaces.precision import Precision


def gpu_kernels(device_type: str, precision: Precision, module: nn.Module) -> AbstractContextManager[Any]:
    """Return a context in which operations save the same tensors as on devices of a type, also in a backward pass."""
    if device_type == "cpu":
        return nullcontext()
    kernels = _KernelsOfGPUs(uses_autocast=precision.compute_dtype != precision.param_dtype)
    for layer in module.modules():
        kernels.enter_in(layer)
    return kernels


_IN_FLOAT32 = {
    # Operations that autocast computes in float32 on CUDA, and not on the CPU: torch's documentation of torch.amp.
    *("cosine_similarity", "cross_entropy", "cumsum", "exp", "group_norm", "layer_norm", "log", "log_softmax", "norm"),
    *("normalize", "pow", "prod", "reciprocal", "rsqrt", "softmax", "softplus", "sum", "nll_loss"),
}


_ATTENTION_DROPOUT = 10
"""Position of ``dropout_p`` in torch.nn.functional.multi_head_attention_forward."""


class _KernelsOfGPUs(TorchFunctionMode):
    """Replaces operations that save other tensors on GPUs than on the CPU.

    Args:
        uses_autocast: Whether steps run in autocast, whose list of operations differs too.
    """

    def __init__(self, *, uses_autocast: bool) -> None:
        super().__init__()
        self._uses_autocast = uses_autocast
        self._is_active = False

    def __enter__(self) -> Self:
        self._is_active = True
        super().__enter__()  # type: ignore[no-untyped-call]  # of torch
        return self

    def __exit__(self, *error: object) -> None:
        self._is_active = False
        super().__exit__(*error)  # type: ignore[no-untyped-call]  # of torch

    def enter_in(self, layer: nn.Module) -> None:
        """Enter the context in a layer's forward also in a backward pass, where it computes activations again."""
        forward = layer.forward

        @wraps(forward)
        def entering(*args: Any, **kwargs: Any) -> Any:
            with nullcontext() if self._is_active else self:
                return forward(*args, **kwargs)

        layer.forward = entering

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name = getattr(func, "__name__", "")
        if name == "dropout":
            return _dropout(*args, **kwargs)
        if name == "scaled_dot_product_attention":
            # The fused kernel saves the state of the generator rather than a mask.
            if len(args) > 4:  # dropout_p is the fifth argument
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        elif name == "multi_head_attention_forward":  # its inner operations do not pass this mode
            args = (*args[:_ATTENTION_DROPOUT], 0.0, *args[_ATTENTION_DROPOUT + 1 :])
        if self._uses_autocast and name in _IN_FLOAT32 and torch.is_autocast_enabled("cpu"):
            args, kwargs = apply_to_tensors((args, kwargs), _in_float32)
        return func(*args, **kwargs)


def _dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:  # noqa: A002, ARG001 - torch's names
    output: Tensor = torch.native_dropout(input, p, training)[0] if training and p else input  # saves a mask of bytes
    return output


def _in_float32(tensor: Tensor) -> Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor
