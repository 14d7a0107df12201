"""The module that a user writes: an ``nn.Module`` with its steps, optimizers and hooks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dstrat.errors import MisuseError
from dstrat.training.module.hooks import DataHooks, ModuleHooks
from dstrat.training.module.logging import LoggingMethods

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.interfaces.precision import ClipAlgorithm
    from dstrat.training.trainer import Trainer


class TrainModule(ModuleHooks, DataHooks, LoggingMethods, nn.Module):
    """An ``nn.Module`` that says how it is trained and evaluated.

    The smallest complete one::

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
        self._trainer: Trainer | None = None

    # Steps

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor | Mapping[str, Any] | None:
        """Compute the loss of one batch.

        Args:
            *args: The batch and its index in the epoch.
            **kwargs: Nothing; for subclasses.

        Returns:
            A scalar tensor, or a dict with it as ``"loss"``.
        """
        raise MisuseError(f"{type(self).__name__} has no training_step: define training_step(self, batch, batch_idx)")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one validation batch; values are kept through :meth:`log`.

        Processes may have different numbers of batches, as each sample is read once: gather across them in
        ``on_validation_epoch_end`` rather than here.
        """
        raise MisuseError(
            f"{type(self).__name__} has no validation_step: define validation_step(self, batch, batch_idx)"
        )

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one test batch; values are kept through :meth:`log`."""
        raise MisuseError(f"{type(self).__name__} has no test_step: define test_step(self, batch, batch_idx)")

    def predict_step(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the predictions of one batch; the module's output unless overridden."""
        return self(batch)

    # Optimization

    def configure_optimizers(self) -> Any:
        """Return the optimizer; also several, with or without schedulers.

        Returns:
            An optimizer, a list of optimizers, a pair of lists (optimizers, schedulers), or a dict with
            ``"optimizer"`` and, if wanted, ``"lr_scheduler"``, which is a scheduler or a dict of the attributes of
            :class:`~dstrat.interfaces.optimization.SchedulerConfig`.
        """
        raise MisuseError(
            f"{type(self).__name__} has no configure_optimizers: define it and return an optimizer, "
            "such as torch.optim.AdamW(self.parameters())"
        )

    def optimizer_step(
        self,
        epoch: int,
        batch_idx: int,
        optimizer: Optimizer,
        optimizer_closure: Callable[[], Any],
    ) -> None:
        """Run the closure, which computes the gradients, and step the optimizer."""
        self.trainer.strategy.optimizer_step(optimizer, optimizer_closure, self)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear the gradients of an optimizer."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self, optimizer: Optimizer, gradient_clip_val: float | None, gradient_clip_algorithm: ClipAlgorithm
    ) -> None:
        """Clip the gradients of an optimizer; they are not scaled."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def clip_gradients(
        self, optimizer: Optimizer, gradient_clip_val: float | None, gradient_clip_algorithm: ClipAlgorithm = "norm"
    ) -> None:
        """Clip the gradients of an optimizer to a norm or a value; None does nothing."""
        if gradient_clip_val is not None:
            self.trainer.strategy.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step a scheduler, with its monitored value where it has one."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    def optimizers(self) -> Any:
        """Return the optimizer, or the list of them where there are several."""
        found = self.trainer.strategy.optimizers
        return found[0] if len(found) == 1 else list(found)

    def lr_schedulers(self) -> Any:
        """Return the scheduler, the list of them where there are several, or None."""
        found = [config.scheduler for config in self.trainer.strategy.lr_schedulers]
        return found[0] if len(found) == 1 else (found or None)

    # Where it runs

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print once for the whole job."""
        self.trainer.print(*args, **kwargs)

    def attach(self, trainer: Trainer | None) -> None:
        """Take the Trainer that runs this module; None at the end of a run."""
        self._trainer = trainer

    @property
    def trainer(self) -> Trainer:
        """The Trainer that runs this module.

        Raises:
            MisuseError: None does.
        """
        if self._trainer is None:
            raise MisuseError(f"{type(self).__name__} is not attached to a Trainer: this works only during a run")
        return self._trainer

    @property
    def device(self) -> torch.device:
        """The device of the module's first parameter or buffer."""
        for tensor in (*self.parameters(), *self.buffers()):
            return tensor.device
        return torch.device("cpu")

    @property
    def current_epoch(self) -> int:
        """Index of the epoch, from 0."""
        return self._trainer.current_epoch if self._trainer else 0

    @property
    def global_step(self) -> int:
        """Number of optimizer steps taken."""
        return self._trainer.global_step if self._trainer else 0

    @property
    def global_rank(self) -> int:
        """Rank of this process in the job."""
        return self._trainer.global_rank if self._trainer else 0

    @property
    def local_rank(self) -> int:
        """Rank of this process on its machine."""
        return self._trainer.local_rank if self._trainer else 0

    @property
    def logger(self) -> Any:
        """The first logger, None without one."""
        return self._trainer.logger if self._trainer else None

    def all_gather(self, tensor: Tensor, group: Any | None = None, sync_grads: bool = False) -> Tensor:
        """Return the tensors of all processes, stacked along a new first dimension."""
        return self.trainer.strategy.all_gather(tensor, group=group, sync_grads=sync_grads)
