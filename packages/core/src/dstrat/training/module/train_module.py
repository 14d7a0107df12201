"""Base class of a user's module: an ``nn.Module`` with steps, optimizers and hooks."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import MisuseError
from dstrat.parallel.shards import is_distributed
from dstrat.training.module.compiling import CompilingMethods
from dstrat.training.module.export import ExportMethods
from dstrat.training.module.hooks import DataHooks, ModuleHooks
from dstrat.training.module.hyperparameters import HyperparametersMixin
from dstrat.training.module.loading import ModuleLoading
from dstrat.training.module.logging import LoggingMethods
from dstrat.training.module.optimization import OptimizationMethods

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


class TrainModule(
    ModuleHooks,
    DataHooks,
    OptimizationMethods,
    LoggingMethods,
    HyperparametersMixin,
    ModuleLoading,
    CompilingMethods,
    ExportMethods,
    nn.Module,  # last, since the classes above extend its methods
):
    """An ``nn.Module`` with its training and evaluation steps, optimizers and hooks.

    The smallest complete subclass::

        class Net(TrainModule):
            def __init__(self):
                super().__init__()
                self.layer = nn.Linear(32, 2)

            def training_step(self, batch, batch_idx):
                x, y = batch
                return nn.functional.cross_entropy(self.layer(x), y)

            def configure_optimizers(self):
                return torch.optim.AdamW(self.parameters(), lr=1e-3)
    """

    def __init__(self) -> None:
        super().__init__()
        self._trainer = None  # in the instance, which export and copies look at

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor | Mapping[str, Any] | None:
        """Compute the loss of one batch.

        Args:
            *args: The batch and its index in the epoch.
            **kwargs: None; for subclasses.

        Returns:
            A scalar tensor, or a dict with it as ``"loss"``, and optionally its ``"weight"``: the number of labels or
            samples that it is the mean of, a number or a tensor with one element.  With weights the gradient of an
            optimizer step is that of ``sum(weight * loss) / sum(weight)``, over all accumulated batches of all ranks,
            in automatic optimization.  Their total is known after the last batch only, so gradients are scaled once
            before the step, before hooks and clipping read them, by a factor that ranks reduce on the device.  Values
            that the step logs without a ``batch_size`` have the same weight.  Each step of each rank returns a weight,
            or none does.  None skips the batch, on one process.
        """
        raise MisuseError(f"{type(self).__name__} has no training_step: define training_step(self, batch, batch_idx)")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one validation batch; log values with :meth:`log`.

        Ranks may have different numbers of batches, as each sample is read once: call collectives in
        ``on_validation_epoch_end``, not here.
        """
        raise MisuseError(
            f"{type(self).__name__} has no validation_step: define validation_step(self, batch, batch_idx)"
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one test batch; log values with :meth:`log`."""
        raise MisuseError(f"{type(self).__name__} has no test_step: define test_step(self, batch, batch_idx)")

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions of one batch; by default the module's output."""
        return self(batch)

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter or buffer with values; in a run, that on which it computes."""
        device, is_shard = torch.device("cpu"), False
        for tensor in chain(self.parameters(), self.buffers()):
            device, is_shard = tensor.device, is_distributed(tensor)
            if not tensor.is_meta:  # layers that other ranks compute have no values
                break
        # A shard may be offloaded to the host.
        in_run = is_shard and self._trainer is not None and self._trainer.is_running
        return self.trainer.strategy.root_device if in_run else device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the module's first floating-point parameter or buffer."""
        tensors = (tensor for tensor in chain(self.parameters(), self.buffers()) if tensor.is_floating_point())
        return next((tensor.dtype for tensor in tensors), torch.get_default_dtype())
