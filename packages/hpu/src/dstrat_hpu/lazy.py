"""Lazy mode: steps that are recorded, and run as one graph up to the gradients and one for the optimizer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from dstrat.interfaces.strategy import Strategy
from dstrat_hpu import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

T = TypeVar("T")


class LazySteps(Strategy):
    """Base of strategies on Gaudi, which end the graph after each backward pass, optimizer step and evaluated batch.

    In eager mode (``PT_HPU_LAZY_MODE=0``) there are no graphs, and nothing is done.  Whoever reads a value in a step
    (``loss.item()``) ends the graph there too, and the host waits for the device.
    """

    _ends_graphs = False

    def setup_environment(self) -> None:
        super().setup_environment()
        self._ends_graphs = runtime.is_lazy()

    def mark_step(self) -> None:
        """End the graph, and let the device run it; the process goes on at once."""
        if self._ends_graphs:
            runtime.mark_step()

    # Steps

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        self.mark_step()

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.mark_step()
        return output

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._ended(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._ended(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._ended(super().predict_step(*args, **kwargs))

    def _ended(self, output: T) -> T:
        self.mark_step()
        return output

    def read_values(self, tensors: Sequence[Tensor]) -> list[float]:
        """Return the values of tensors with one element each, by one copy for each dtype: Gaudi has no float64."""
        import torch

        by_dtype: dict[torch.dtype, list[int]] = {}
        for index, tensor in enumerate(tensors):
            by_dtype.setdefault(tensor.dtype, []).append(index)
        values = [0.0] * len(tensors)
        for indices in by_dtype.values():
            read = torch.stack([tensors[index].reshape(()) for index in indices]).tolist()
            for index, value in zip(indices, read, strict=True):
                values[index] = float(value)
        return values
