"""The precision that computes in 16 bits and keeps parameters in 32."""

from __future__ import annotations

import copy
import itertools
from typing import TYPE_CHECKING, Any

import torch

from dstrat.builtin.precision.loss_scale import LossScale
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.precision import Precision

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from contextlib import AbstractContextManager

    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import ClipAlgorithm

_COMPUTE_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


class MixedPrecision(Precision):
    """Parameters and their gradients in float32; matrix products and convolutions in 16 bits, through autocast.

    ``"16-mixed"`` scales the loss, so that small gradients do not become zero in float16.  A step whose gradients
    are not finite is skipped and logged, and the scale becomes smaller.

    Args:
        precision: ``"bf16-mixed"`` or ``"16-mixed"``.
        device: Type of the device for autocast, such as ``"cuda"``; None takes that of the module.
        scaler: How the loss scale adapts, for ``"16-mixed"`` only; None takes torch's defaults.
    """

    def __init__(
        self, precision: str = "bf16-mixed", device: str | None = None, scaler: torch.amp.GradScaler | None = None
    ) -> None:
        if precision not in _COMPUTE_DTYPES:
            raise RequestError(f"MixedPrecision({precision!r}) is not possible: choose {' or '.join(_COMPUTE_DTYPES)}")
        if scaler is not None and precision != "16-mixed":
            raise ConflictError(f"precision {precision!r} scales no loss, and a scaler was given: leave it out")
        self.flag = precision
        self.device = device
        self._scaler = scaler
        self._loss_scale = self._new_loss_scale()
        self._module: Module | None = None

    @property
    def param_dtype(self) -> torch.dtype:
        return torch.float32

    @property
    def compute_dtype(self) -> torch.dtype:
        return _COMPUTE_DTYPES[self.flag]

    @property
    def reduce_dtype(self) -> torch.dtype:
        return torch.float32

    def connect(self, module: Module) -> Module:
        self._module = module  # its device is asked in each step, because it still moves
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device or self._module_device(), dtype=self.compute_dtype)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self._loss_scale.scale(loss) if self._loss_scale else loss

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self._loss_scale:
            self._loss_scale.unscale(optimizer)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if self._loss_scale is None:
            return super().optimizer_step(optimizer, closure, **kwargs)
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ConflictError(
                "precision '16-mixed' cannot scale the losses of LBFGS, which computes several in one step: "
                "choose 'bf16-mixed' or '32-true'"
            )
        loss = closure()
        self._loss_scale.step(optimizer, **kwargs)
        return loss

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        self.unscale_gradients(optimizer)
        super().clip_gradients(optimizer, clip_val, algorithm)

    def state_dict(self) -> dict[str, Any]:
        return self._loss_scale.state_dict() if self._loss_scale else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._loss_scale:
            self._loss_scale.load_state_dict(state)

    def teardown(self) -> None:
        self._module = None
        self._loss_scale = self._new_loss_scale()  # a step that broke has left the old one halfway

    def _new_loss_scale(self) -> LossScale | None:
        return LossScale(copy.deepcopy(self._scaler)) if self.flag == "16-mixed" else None

    def _module_device(self) -> str:
        if self._module is None:
            raise MisuseError(
                f"precision {self.flag!r} knows no device yet: connect a module, or give it device='cuda'"
            )
        tensors = itertools.chain(self._module.parameters(), self._module.buffers())
        return next((tensor.device.type for tensor in tensors), "cpu")
