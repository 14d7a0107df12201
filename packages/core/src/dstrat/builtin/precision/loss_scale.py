"""Scaling a loss whose gradients would become zero in float16."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor
    from torch.optim import Optimizer

_log = logging.getLogger(__name__)


class LossScale:
    """A scale that adapts itself, around torch's ``GradScaler``.

    The scale changes before the first loss after a step, and not in the step: several optimizers that step one after
    the other, after backward passes of one scale, then all undo the same scale.

    Args:
        scaler: How the scale adapts; None takes torch's defaults, on the device of the first loss.
    """

    def __init__(self, scaler: torch.amp.GradScaler | None = None) -> None:
        self._scaler = scaler
        self._loaded_state: dict[str, Any] = {}
        self._unscaled: set[int] = set()
        self._has_stepped = False

    def scale(self, loss: Tensor) -> Tensor:
        """Return the loss (a scalar) times the scale."""
        self._adapt()
        if self._scaler is None:
            self._scaler = torch.amp.GradScaler(loss.device.type)
            self.load_state_dict(self._loaded_state)
        return self._scaler.scale(loss)

    def unscale(self, optimizer: Optimizer) -> None:
        """Undo the scale in the gradients of an optimizer, once between two steps."""
        if self._scaler is None or id(optimizer) in self._unscaled or not _has_gradients(optimizer):
            return
        self._scaler.unscale_(optimizer)
        self._unscaled.add(id(optimizer))

    def step(self, optimizer: Optimizer, **kwargs: Any) -> None:
        """Step the optimizer, or log that its gradients are not finite.

        Fused optimizers find that out on the device: they skip the step as well, but nothing is logged.

        Raises:
            MisuseError: The gradients come from a loss that was not scaled.
        """
        if not _has_gradients(optimizer):
            return
        if self._scaler is None:
            raise MisuseError(
                "the gradients come from a loss that precision '16-mixed' has not scaled: "
                "compute them with the strategy's backward instead of loss.backward()"
            )
        steps: list[None] = []
        hook = optimizer.register_step_post_hook(lambda *_: steps.append(None))
        try:
            self._scaler.step(optimizer, **kwargs)
        finally:
            hook.remove()
        self._has_stepped = True
        if not steps:
            _log.warning(
                "step skipped: a gradient is not finite at the loss scale %g, which becomes smaller",
                self._scaler.get_scale(),
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and when it changes next; empty before the first loss."""
        self._adapt()
        return self._loaded_state if self._scaler is None else self._scaler.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""
        self._loaded_state = dict(state)
        if self._scaler is not None and state:
            self._scaler.load_state_dict(dict(state))

    def _adapt(self) -> None:
        if self._scaler is not None and self._has_stepped:
            self._scaler.update()
            self._unscaled.clear()
            self._has_stepped = False


def _has_gradients(optimizer: Optimizer) -> bool:
    return any(parameter.grad is not None for group in optimizer.param_groups for parameter in group["params"])
