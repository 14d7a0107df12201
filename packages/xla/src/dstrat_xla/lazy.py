"""Lazy execution: steps that are recorded, and run as one graph for each step of the optimizer."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import DataLoader

from dstrat.interfaces.strategy import Strategy
from dstrat_xla import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.nn import Module
    from torch.optim import Optimizer

T = TypeVar("T")

_log = logging.getLogger(__name__)


class LazySteps(Strategy):
    """The base of strategies whose device runs a graph of recorded operations.

    torch_xla records what the module computes.  The device runs it when the graph is cut: after each step of an
    optimizer, after each batch that is evaluated, and where evaluation begins and ends.  Whoever reads a value before
    that (``loss.item()``, ``print(loss)``) cuts the graph there too, and the device computes twice what both need.

    A graph is compiled for each new shape, so that a last batch with fewer samples is logged before training starts.
    """

    allows_inference_mode = False  # tensors of inference mode have no place in a graph that goes on after it

    def mark_step(self) -> None:
        """End the graph, and let the device run it; the process goes on at once."""
        runtime.cut()

    # Steps

    def optimizer_step(
        self, optimizer: Optimizer, closure: Callable[[], Any], model: Module | None = None, **kwargs: Any
    ) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        self.mark_step()
        return output

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Keep what training has recorded, and what evaluation records, in graphs of their own."""
        self.mark_step()
        with super().evaluation_context():
            yield
        self.mark_step()

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._ended(super().validation_step(*args, **kwargs))

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._ended(super().test_step(*args, **kwargs))

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._ended(super().predict_step(*args, **kwargs))

    def _ended(self, output: T) -> T:
        self.mark_step()
        return output

    # Batches

    def process_dataloader(self, dataloader: Any) -> Any:
        if (size := _size_of_last_batch(dataloader)) is not None and self.is_global_zero:
            _log.warning(
                "the last batch of a loader has %d samples and the others %d, and XLA compiles a graph for each shape: "
                "pass drop_last=True, or data that fills all batches",
                size,
                dataloader.batch_size,
            )
        return super().process_dataloader(dataloader)


def _size_of_last_batch(loader: Any) -> int | None:
    """Return how many samples the last batch has where these are fewer; None where that is not so, or not known."""
    if not isinstance(loader, DataLoader) or loader.batch_size is None or loader.drop_last:
        return None
    try:
        return len(loader.sampler) % loader.batch_size or None  # type: ignore[arg-type]  # which may have no length
    except TypeError:
        return None
