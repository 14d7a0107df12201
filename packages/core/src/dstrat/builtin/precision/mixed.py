"""Mixed precision: computes in 16 bits, keeps parameters in 32, scales the loss for float16."""

from __future__ import annotations

import copy
import itertools
import logging
import math
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.interfaces.precision import Precision
from dstrat.parallel.optimizer_closures import recomputes_loss
from dstrat.parallel.shards import is_distributed

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
            raise ConflictError(
                f"scaler needs precision='16-mixed', not {precision!r}, which scales no loss: leave it out"
            )
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
        self._module = module  # its device is read in each step, because it still moves
        return module

    def forward_context(self) -> AbstractContextManager[Any]:
        # Without the cache of cast weights: a step that steps an optimizer, as that of a GAN, or computes without
        # gradients before, would go on with old weights, or with weights that get no gradient.
        device = self.device or self._module_device()
        return torch.autocast(device, dtype=self.compute_dtype, cache_enabled=False)

    def scale_loss(self, loss: Tensor) -> Tensor:
        return self._loss_scale.scale(loss) if self._loss_scale else loss

    def unscale_gradients(self, optimizer: Optimizer) -> None:
        if self._loss_scale:
            self._loss_scale.unscale(optimizer, self.reduce_overflow, self.peers_have_gradients)

    def optimizer_step(self, optimizer: Optimizer, closure: Callable[[], Any], **kwargs: Any) -> Any:
        if self._loss_scale is None:
            return super().optimizer_step(optimizer, closure, **kwargs)
        if recomputes_loss(optimizer):
            raise ConflictError(
                f"precision '16-mixed' cannot scale the losses of {type(optimizer).__name__}, which computes several "
                "in one step: choose 'bf16-mixed' or '32-true'"
            )
        loss = closure()
        self._loss_scale.unscale(optimizer, self.reduce_overflow, self.peers_have_gradients)
        self._loss_scale.step(optimizer, **kwargs)
        return loss

    def clip_gradients(self, optimizer: Optimizer, clip_val: float, algorithm: ClipAlgorithm = "norm") -> None:
        self.unscale_gradients(optimizer)  # for callers that only clip, such as a hand-written loop
        super().clip_gradients(optimizer, clip_val, algorithm)

    def state_dict(self) -> dict[str, Any]:
        return self._loss_scale.state_dict() if self._loss_scale else {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self._loss_scale:
            self._loss_scale.load_state_dict(state)

    def teardown(self) -> None:
        self._module = self.reduce_overflow = None
        self.peers_have_gradients = False
        self._loss_scale = self._new_loss_scale()  # after an error the old one may be between unscale and step

    def _new_loss_scale(self) -> LossScale | None:
        # A copy, as the user's scaler is where each run begins.
        return LossScale(copy.deepcopy(self._scaler)) if self.flag == "16-mixed" else None

    def _module_device(self) -> str:
        if self._module is None:
            raise MisuseError(f"precision {self.flag!r} has no device yet: connect a module, or pass device='cuda'")
        tensors = itertools.chain(self._module.parameters(), self._module.buffers())
        # On meta are the layers of other ranks, in a pipeline.
        present: Any = next((tensor for tensor in tensors if not tensor.is_meta), None)
        if present is None:
            return "cpu"
        # A shard may be offloaded to the host; the device of its mesh computes with it.
        device_type: str = present.device_mesh.device_type if is_distributed(present) else present.device.type
        return device_type


# Loss scale for float16


_log = logging.getLogger(__name__)


class LossScale:
    """Dynamic loss scale, a wrapper of torch's ``GradScaler``.

    The scale changes before the first loss after a step, and not in the step: several optimizers may step one after
    the other, after backward passes with one scale, and all must undo the same scale.

    A loss may follow gradients that were unscaled, for clipping, and not used in a step.  They are scaled again then,
    so that gradients which are added to them have the same scale, and all are unscaled together.

    Args:
        scaler: How the scale adapts; None takes torch's defaults, on the device of the first loss.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self._scaler = scaler
        self._loaded_state: dict[str, Any] = {}
        self._unscaled: dict[int, Optimizer] = {}
        self._stepped: set[int] = set()

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss (a scalar) times the scale."""
        if self._unscaled or self._stepped:
            self._adapt()
        if self._scaler is None:  # made now, as the device of the training is not known before
            self._scaler = torch.amp.GradScaler(loss.device.type)
            self.load_state_dict(self._loaded_state)
        return self._scaler.scale(loss)

    def unscale(
        self,
        optimizer: Optimizer,
        reduce_overflow: Callable[[Tensor], object] | None = None,
        peers_have_gradients: bool = False,
    ) -> None:
        """Undo the scale in the gradients of an optimizer, once between a loss and the next one.

        Args:
            optimizer: The optimizer.
            reduce_overflow: Takes the maximum over processes of a tensor that is 1 where a gradient is not finite.
            peers_have_gradients: Whether other processes may have gradients where this one has none.
        """
        # GradScaler raises at a second time, and for an optimizer without gradients.
        if self._scaler is None or id(optimizer) in self._unscaled:
            return
        if not (peers_have_gradients or _gradients(optimizer)):
            return
        self._scaler.unscale_(optimizer)
        self._unscaled[id(optimizer)] = optimizer
        if reduce_overflow is not None:
            # DTensor reduces over the mesh of the first gradient, which may not be that of all.
            overflows = self._scaler._found_inf_per_device(optimizer)  # noqa: SLF001 - no public name
            if not overflows:
                scale: Any = self._scaler._scale  # noqa: SLF001 - on the device of the loss
                # On the device of gradients, as that of peers: the host, where parameters are offloaded to it.
                parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
                device = next((parameter.device for parameter in parameters if not parameter.is_meta), scale.device)
                overflows[device] = torch.zeros_like(scale, device=device)
            for overflow in overflows.values():
                reduce_overflow(overflow)

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step the optimizer, or log that its gradients are not finite.

        Fused optimizers check that on the device: they skip the step as well, but it is not logged.

        Raises:
            MisuseError: The gradients come from a loss that was not scaled.
        """
        if not _gradients(optimizer) and id(optimizer) not in self._unscaled:
            return
        if self._scaler is None:
            raise MisuseError(
                "the gradients come from a loss that precision '16-mixed' has not scaled: "
                "compute them with the strategy's backward instead of loss.backward()"
            )
        steps: list[None] = []  # one if it has stepped, which GradScaler does not return
        hook = optimizer.register_step_post_hook(lambda *_: steps.append(None))
        try:
            self._scaler.step(optimizer, **kwargs)
        finally:
            hook.remove()
        self._stepped.add(id(optimizer))
        if not steps:
            _log.warning(
                "step skipped: a gradient is not finite at the loss scale %g, which becomes smaller",
                self._scaler.get_scale(),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and when it changes next; empty before the first loss."""
        if self._stepped:
            self._adapt()
        return self._loaded_state if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned."""
        self._loaded_state = dict(state)
        if self._scaler is not None and state:
            self._scaler.load_state_dict(dict(state))

    def _adapt(self) -> None:
        """Change the scale after a step, and apply it to unscaled gradients that were not used in one."""
        assert self._scaler is not None  # noqa: S101 - nothing is unscaled without it
        unused = [optimizer for key, optimizer in self._unscaled.items() if key not in self._stepped]
        # Read before the update, which adds them up in place.
        overflows = [any(self._scaler._found_inf_per_device(optimizer).values()) for optimizer in unused]  # noqa: SLF001
        if self._stepped:
            self._scaler.update()
        for optimizer, overflow in zip(unused, overflows, strict=True):
            # Clipping may have made the gradients finite: their step is to be skipped nevertheless.
            factor = math.inf if overflow else self._scaler.get_scale()
            with torch.no_grad():
                for gradient in _gradients(optimizer):
                    gradient.mul_(factor)
            self._scaler._per_optimizer_states.pop(id(optimizer), None)  # noqa: SLF001 - unscale_ would raise
        self._unscaled.clear()
        self._stepped.clear()


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    parameters = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return [parameter.grad for parameter in parameters if parameter.grad is not None]
