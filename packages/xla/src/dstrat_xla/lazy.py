"""Lazy execution: steps that are recorded, and run as one graph for each step of the optimizer."""

from __future__ import annotations

import logging
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any, TypeVar

from torch.utils.data import BatchSampler
from typing_extensions import override

from dstrat.data.combined_loader import source_leaves
from dstrat.data.samplers import RankBatchSampler, RepeatedBatches
from dstrat.interfaces.batch import apply_to_tensors, move_to_device, tensors_in
from dstrat.interfaces.strategy import Strategy
from dstrat.interfaces.tied_parameters import keep_ties
from dstrat_xla import runtime

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import torch
    from torch import Tensor
    from torch.optim import Optimizer

T = TypeVar("T")

_log = logging.getLogger(__name__)


class LazySteps(Strategy):
    """Base of strategies whose device runs graphs of recorded operations.

    torch_xla records the operations of the module.  The device runs them when the graph is cut: after each step of an
    optimizer, after each evaluated batch, and where evaluation begins and ends.  Reading a value before that
    (``loss.item()``, ``print(loss)``) cuts the graph too, and the device computes operations that both graphs need
    twice.

    A graph is compiled for each new shape, so a last batch with fewer samples is logged before training starts.
    """

    allows_inference_mode = False  # a graph that continues afterwards cannot use tensors of inference mode

    # Moving the module: torch creates new parameters when they move to an XLA device or back

    def model_to_device(self) -> None:
        with keep_ties(self.module):
            super().model_to_device()  # type: ignore[safe-super]  # of the class beside this one

    def on_exception(self, exception: BaseException) -> None:
        """Drop the gradients of the failed step, which were recorded only.

        When the module leaves the device, each gradient would compile and run another graph, with collectives of a
        step in which the other processes do not take part.
        """
        if self._module is not None:
            self._module.zero_grad(set_to_none=True)
        super().on_exception(exception)

    def teardown(self) -> None:
        with nullcontext() if self._module is None else keep_ties(self._module):
            super().teardown()

    def mark_step(self) -> None:
        """Cut the graph, and start it on the device without waiting for it."""
        runtime.cut()

    @contextmanager
    def evaluation_context(self) -> Iterator[None]:
        """Separate the graphs of training and evaluation."""
        self.mark_step()  # or the first graph of each evaluation would have the rest of a training step in it
        with super().evaluation_context():
            yield
        self.mark_step()

    def read_values(self, tensors: Sequence[Tensor]) -> list[float]:
        return [float(value) for value in runtime.fetch(tensors)]

    # State: on the host, where slices of a tensor can be written without compiling a graph for each

    def sharded_module_state(self) -> dict[str, Any]:
        return self._on_host(super().sharded_module_state())

    def sharded_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        return self._on_host(super().sharded_optimizer_state(optimizer))

    def _on_host(self, state: dict[str, Any]) -> dict[str, Any]:
        return runtime.state_on_host(state)

    # Batches

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        """Return the batch on the device: its tensors are converted on the host, and sent in one transfer."""
        device = device or self.root_device
        batch = self.precision_plugin.convert_input(batch)
        # By id, as a batch may have a tensor twice.
        on_host = {id(tensor): tensor for tensor in tensors_in(batch) if tensor.device.type == "cpu"}
        sent = dict(zip(on_host, runtime.send(list(on_host.values()), device), strict=True))
        return move_to_device(apply_to_tensors(batch, lambda tensor: sent.get(id(tensor), tensor)), device)

    def prefetch(self, items: Iterable[T], move: Callable[[T], T]) -> Iterator[T]:
        from dstrat_xla.loader import Prefetcher  # a class of torch_xla's

        return iter(Prefetcher(items, move, self.root_device))

    def process_dataloader(self, dataloader: Any) -> Any:
        for loader in source_leaves(dataloader):
            if (sizes := _uneven_sizes(loader)) is not None and self.is_global_zero:
                _log.warning(
                    "the last batch of a loader has %d samples and the others %d, and XLA compiles a graph for each "
                    "shape: pass drop_last=True, or data that fills all batches",
                    *sizes,
                )
        return super().process_dataloader(dataloader)


def _uneven_sizes(loader: Any) -> tuple[int, int] | None:
    """Return the sizes of the last batch and of the others; None if they are the same, or unknown."""
    batches = getattr(loader, "batch_sampler", None)
    while isinstance(batches, RankBatchSampler | RepeatedBatches):  # of an evaluation that processes share
        batches = batches.batches
    # A class derived from torch's may form batches in another way.
    if not isinstance(batches, BatchSampler) or type(batches).__iter__ is not BatchSampler.__iter__:
        return None
    if batches.drop_last:
        return None
    try:
        size = len(batches.sampler) % batches.batch_size  # type: ignore[arg-type]  # which may have no length
    except TypeError:
        return None
    return (size, batches.batch_size) if size else None
