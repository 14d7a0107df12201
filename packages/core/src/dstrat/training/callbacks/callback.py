"""The base class of callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.interfaces.keywords import NamedArguments
from dstrat.interfaces.retired_members import RetiredMembers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor
    from torch.optim import Optimizer

    from dstrat.training.loops.sources import DataSources
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class Callback(NamedArguments, RetiredMembers):
    """Hooks of a run, independent of the module.

    A callback overrides the hooks that it needs; other hooks cost nothing.  They are called in every process: those of
    callbacks in the user's order, then those of the module, then those of callbacks with ``runs_last``.

    Attributes:
        runs_last: Whether its hooks follow the module's, so that it can read values that the module logs in the same
            hook.
        saves_checkpoints: Whether it writes checkpoints.  Its hooks follow all others, whose latest state is then in
            the checkpoint.
        saves_in_memory: Whether its method ``save_now`` saves a complete checkpoint in memory between two steps, for
            ``elastic="replace"``.
        averages_weights: Whether it averages the weights over steps, for which all ranks must train the same ones.
        renames_parameters: Whether parameters have other names after some of its hooks, as pruned ones do.
        reads_batch_indices: Whether it reads ``trainer.predict_batch_indices``, which are recorded only then.
    """

    runs_last: bool = False
    saves_checkpoints: bool = False
    saves_in_memory: bool = False
    averages_weights: bool = False
    renames_parameters: bool = False
    reads_batch_indices: bool = False
    _logging_module: TrainModule | None = None  # of the run

    def log(self, name: str, value: Any, *args: Any, **options: Any) -> None:
        """Log a value in a hook, as :meth:`TrainModule.log` does; does nothing outside of a run."""
        if self._logging_module is not None:
            self._logging_module.log(name, value, *args, **options)

    def log_dict(self, dictionary: Mapping[str, Any], *args: Any, **options: Any) -> None:
        """Log several values in a hook, as :meth:`TrainModule.log_dict` does."""
        if self._logging_module is not None:
            self._logging_module.log_dict(dictionary, *args, **options)

    @property
    def state_key(self) -> str:
        """The key of the callback's state in checkpoints; unique among the callbacks of a Trainer."""
        return type(self).__qualname__

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""

    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called at the start of a stage: fit, validate, test or predict."""

    def teardown(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Called at the end of a stage, also after an exception."""

    def on_exception(self, trainer: Trainer, module: TrainModule, exception: BaseException) -> None:
        """Called when the run fails or is interrupted, for example by Ctrl-C."""

    def on_sanity_check_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the sanity check, a few validation batches at the start of a fit."""

    def on_sanity_check_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the sanity check."""

    def on_before_fit(self, trainer: Trainer, module: TrainModule, sources: DataSources) -> None:
        """Called by ``fit`` before the run, in which processes are started; it may run other Trainers.

        Args:
            trainer: The Trainer, not yet in a run.
            module: The module passed to ``fit``.
            sources: The sources of loaders.
        """

    def on_configure_optimizers(self, trainer: Trainer, module: TrainModule, optimizers: Sequence[Optimizer]) -> None:
        """Called in a fit after the optimizers are made, before a checkpoint is loaded into them."""

    def on_fit_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the start of a fit, with the module on its device."""

    def on_fit_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called at the end of a fit."""

    def on_train_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before the first epoch."""

    def on_train_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self, trainer: Trainer, module: TrainModule) -> None:
        """Called before an epoch's first batch."""

    def on_train_epoch_end(self, trainer: Trainer, module: TrainModule) -> None:
        """Called after an epoch's last batch and its validation."""

    def on_train_batch_start(self, trainer: Trainer, module: TrainModule, batch: Any, batch_idx: int) -> int | None:
        """Called before a training batch; return -1 to skip the batch and the rest of the epoch.

        If one rank returns -1, the epoch ends on all of them.  Ranks communicate before each batch for this, unless the
        method is annotated with ``-> None``.
        """

    def on_train_batch_end(
        self, trainer: Trainer, module: TrainModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Called after a training batch.

        Args:
            trainer: The Trainer.
            module: The module.
            outputs: A dict of what ``training_step`` returned, without the autograd graph. Its ``"loss"`` is divided by
                the number of batches of one optimizer step.  It is empty after a step that returned None; after a batch
                that was None it is None.
            batch: The batch, on the device.
            batch_idx: Its index in the epoch.
        """

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
        """Called after validation, when its values are reduced."""

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
        """Add entries to a checkpoint before it is written."""

    def on_load_checkpoint(self, trainer: Trainer, module: TrainModule, checkpoint: dict[str, Any]) -> None:
        """Read entries of a checkpoint."""

    def restore_average(self, trainer: Trainer, load: Callable[[Mapping[str, Any]], None]) -> None:
        """Read an average of the weights from a checkpoint, from which a fit resumes, after the strategy's setup.

        Every process calls it, if the checkpoint has an average as its ``state_dict``.

        Args:
            trainer: In the fit.
            load: Loads the average into tensors by name, which are sharded as those of ``strategy.local_weights()``.
        """
