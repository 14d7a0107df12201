"""Base class of strategies with a replica of the module in each process, which synchronize gradients."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dstrat.parallel.strategy import ParallelStrategy

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from torch.nn import Parameter


class GradientSyncStrategy(ParallelStrategy):
    """A strategy whose subclass defines only the synchronization of gradients.

    Each process has a replica of the module, and computes gradients from its share of the data.  The smallest complete
    subclass::

        class Averaging(GradientSyncStrategy):
            def synchronize_gradients(self, gradients):
                for gradient in gradients:
                    gradient.copy_(self.reduce(gradient))

    This class handles accumulation, clipping, loss scales, parameters without a gradient in some processes, the initial
    parameters, and the buffers, which are those of global rank 0.  It does not communicate during the backward pass; a
    strategy that does wraps the module, see :meth:`wrap_model`.

    Attributes:
        gradients_may_lack: Whether processes agree in each step on the parameters that have a gradient in any of them.
            A backend that records one graph for all processes sets it to False: then a parameter has a gradient in
            every process or in none.
    """

    compares_replicas = True
    gradients_may_lack: bool = True
    _is_accumulating = False

    @abstractmethod
    def synchronize_gradients(self, gradients: Sequence[Tensor]) -> None:
        """Overwrite the gradients of this process by synchronized ones; collective.

        It is called after a backward pass, before hooks and clipping read the gradients; with accumulation, after the
        last backward pass of an optimizer step.

        Args:
            gradients: One for each trainable parameter, in the order of the module, on its device and in its dtype, of
                the same shapes in every process; zeros if this process has none.  With a loss scale they are scaled.
        """

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if not self._is_accumulating:
            self._synchronize([parameter for parameter in self.module.parameters() if parameter.requires_grad])
            # Running statistics come from each process's data; all evaluate and save with the same ones.
            self.broadcast_tensors(self.module.buffers())

    @contextmanager
    def no_backward_sync(self) -> Iterator[None]:
        was_accumulating, self._is_accumulating = self._is_accumulating, True
        try:
            yield
        finally:
            self._is_accumulating = was_accumulating

    def _synchronize(self, parameters: Sequence[Parameter]) -> None:
        if not self.gradients_may_lack:
            self.synchronize_gradients([parameter.grad for parameter in parameters if parameter.grad is not None])
            return
        has_gradient = [parameter.grad is not None for parameter in parameters]
        # Only a process that lacks a gradient reads the result, because reading it synchronizes a GPU.
        anywhere = self.reduce(self.from_host(torch.tensor(has_gradient, dtype=torch.int32)), reduce_op="max")
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.synchronize_gradients([parameter.grad for parameter in parameters if parameter.grad is not None])
        if not all(has_gradient):
            for parameter, is_used in zip(parameters, anywhere.tolist(), strict=True):
                if not is_used:
                    parameter.grad = None  # with zeros an optimizer would apply weight decay to an unused parameter
