"""Backward passes that a training step runs by itself, inside the forward of DistributedDataParallel."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn.parallel import DistributedDataParallel

    from dstrat_ddp.step_module import StepWatch


class ManualBackward:
    """Prepares the averaging of gradients for each backward pass inside a step, and not again after the step.

    DistributedDataParallel by itself expects one backward pass, after its forward.

    Args:
        model: What the steps run in.
        watch: Knows when a step is running.
    """

    def __init__(self, model: DistributedDataParallel, watch: StepWatch) -> None:
        self._model = model
        self._watch = watch
        self._ran = False
        watch.after_step = self._after_step

    def before_backward(self, loss: Tensor) -> None:
        """Prepare for the backward pass from a loss, if a step is running."""
        if not self._watch.is_running:
            return
        self._ran = True
        model = self._model
        if model.require_backward_grad_sync:
            searches = model.find_unused_parameters and not model.static_graph
            model.reducer.prepare_for_backward([loss] if searches else [])

    def after_forward(self) -> None:
        """Let the next step average gradients and share buffers again."""
        if self._ran:
            self._ran = False
            self._model.require_backward_grad_sync = True
            self._model.require_forward_param_sync = True

    def _after_step(self) -> None:
        # Otherwise the end of the forward prepares for a backward pass that has been already.
        if self._ran:
            self._model.require_backward_grad_sync = False
