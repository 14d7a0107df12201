"""The base class of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.training.loops.sources import DataSources
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class Callback:
    """Something that is told what happens during a run, apart from the module.

    A callback overrides the hooks that it needs; the others cost nothing.  Hooks are called in every process: of the
    callbacks in the order in which the user gave them, then of the module, then of the callbacks that run last.

    Attributes:
        runs_last: Whether it is called after the module, so that it sees what the module logs in the same hook.
        saves_checkpoints: Whether it writes checkpoints: it is called after all others then, so that these hold the
            others' newest state.
        reads_batch_indices: Whether it asks the trainer for ``predict_batch_indices``, which are looked up only then.
    """

    runs_last: bool = False
    saves_checkpoints: bool = False
    reads_batch_indices: bool = False
    _logging_module: TrainModule | None = None  # of the run

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value in a hook, as :meth:`TrainModule.log` does; nothing happens outside a run."""
        if self._logging_module is not None:
            self._logging_module.log(name, value, *args, **options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log several values in a hook, as :meth:`TrainModule.log_dict` does."""
        if self._logging_module is not None:
            self._logging_module.log_dict(dictionary, *args, **options)

    @property
    def state_key(self) -> str:
        """The name under which the callback's state is in a checkpoint; unique among the callbacks of a trainer."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return what must be in a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called first in every process; the stage is fit, validate, test or predict."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called last in every process, also after an exception."""

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Called when the run breaks, also by Ctrl-C."""

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the few validation batches at the start of a fit."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the few validation batches at the start of a fit."""

    def on_before_fit(self, trainer: Trainer, module: TrainModule, sources: DataSources) -> None:
        """Called by ``fit`` before the run begins and any other process is started; other runs are still possible.

        Args:
            trainer: The Trainer, which runs nothing yet.
            module: As it was passed.
            sources: Where the batches come from.
        """

    def on_configure_optimizers(self, trainer: Trainer, module: TrainModule, optimizers: Sequence[Optimizer]) -> None:
        """Called in a fit when the optimizers exist, before a checkpoint is loaded into them."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when the module is on its device."""

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called when the fit is over."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before an epoch's first batch."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after an epoch's last batch and its validation."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> int | None:
        """Called before a batch is trained on; return -1 to leave out the batch and the rest of the epoch.

        Where one process returns -1, the epoch ends in all of them.  For this several processes communicate before
        each batch, unless the method is annotated with ``-> None``.
        """

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a batch was trained on; outputs is what ``training_step`` returned."""

    def on_before_zero_grad(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, trainer: Trainer, module: TrainModule, loss: Tensor) -> None:
        """Called before the backward pass."""

    def on_after_backward(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the backward pass."""

    def on_before_optimizer_step(self, trainer: Trainer, module: TrainModule, optimizer: Optimizer) -> None:
        """Called before clipping and the optimizer's step."""

    def on_validation_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before validation."""

    def on_validation_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after validation, when its values are known."""

    def on_validation_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a validation batch."""

    def on_test_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before testing."""

    def on_test_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after testing."""

    def on_test_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a test batch."""

    def on_test_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a test batch."""

    def on_predict_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before prediction."""

    def on_predict_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after prediction."""

    def on_predict_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(
        self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Called after a prediction batch."""

    def on_save_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Add something to a checkpoint before it is written."""

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Read something from a checkpoint."""
