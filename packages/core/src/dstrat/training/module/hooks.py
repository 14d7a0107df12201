"""The hooks that a module, a data module or a callback may override, none of which does anything by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from torch.optim import Optimizer


class DataHooks:
    """Where data comes from, and how a batch reaches the device."""

    def prepare_data(self) -> None:
        """Download or write data; called once on each machine, before any other process goes on."""

    def setup(self, stage: str) -> None:
        """Make ready what every process needs; the stage is fit, validate, test or predict."""

    def teardown(self, stage: str) -> None:
        """Free what :meth:`setup` made."""

    def train_dataloader(self) -> Any:
        """Return what training iterates over."""

    def val_dataloader(self) -> Any:
        """Return what validation iterates over, or a list of such."""

    def test_dataloader(self) -> Any:
        """Return what testing iterates over, or a list of such."""

    def predict_dataloader(self) -> Any:
        """Return what prediction iterates over, or a list of such."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch before it goes to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Move a batch of a type of one's own to the device."""
        from dstrat.interfaces.batch import move_to_device

        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Change a batch when it is on the device."""
        return batch


class ModuleHooks:
    """What a module is told while it is trained and evaluated."""

    if TYPE_CHECKING:

        def eval(self) -> Any: ...

        def zero_grad(self, set_to_none: bool = True) -> None: ...

    def configure_callbacks(self) -> Any:
        """Return a callback or several that this module needs; they replace those of the same class."""
        return []

    def configure_model(self) -> None:
        """Create layers when devices and processes are known; called before the strategy takes the module."""

    def on_fit_start(self) -> None:
        """Called first in every process."""

    def on_fit_end(self) -> None:
        """Called last in every process."""

    def on_train_start(self) -> None:
        """Called before the first epoch, after sanity checking."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before an epoch's first batch."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch's last batch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a batch is trained on; return -1 to leave out the batch and the rest of the epoch.

        Where one process returns -1, the epoch ends in all of them.  For this several processes communicate before
        each batch, unless the method is annotated with ``-> None``.
        """

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a batch was trained on."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before the backward pass."""

    def on_after_backward(self) -> None:
        """Called after the backward pass; gradients may still be scaled."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before clipping and the optimizer's step, with unscaled gradients."""

    def on_validation_model_zero_grad(self) -> None:
        """Called before validation during a fit, unless gradients are being accumulated; frees their memory."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Put the module into evaluation mode, before validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Called after validation, when each part of the module is back in the mode that it had before."""

    def on_validation_start(self) -> None:
        """Called before validation."""

    def on_validation_end(self) -> None:
        """Called after validation."""

    def on_validation_epoch_start(self) -> None:
        """Called before the first validation batch."""

    def on_validation_epoch_end(self) -> None:
        """Called after the last validation batch."""

    def on_validation_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a validation batch."""

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a validation batch."""

    def on_test_model_eval(self) -> None:
        """Put the module into evaluation mode, before testing."""
        self.eval()

    def on_test_model_train(self) -> None:
        """Called after testing, when each part of the module is back in the mode that it had before."""

    def on_test_start(self) -> None:
        """Called before testing."""

    def on_test_end(self) -> None:
        """Called after testing."""

    def on_test_epoch_start(self) -> None:
        """Called before the first test batch."""

    def on_test_epoch_end(self) -> None:
        """Called after the last test batch."""

    def on_test_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a test batch."""

    def on_test_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a test batch."""

    def on_predict_model_eval(self) -> None:
        """Put the module into evaluation mode, before prediction."""
        self.eval()

    def on_predict_model_train(self) -> None:
        """Called after prediction, when each part of the module is back in the mode that it had before."""

    def on_predict_start(self) -> None:
        """Called before prediction."""

    def on_predict_end(self) -> None:
        """Called after prediction."""

    def on_predict_epoch_start(self) -> None:
        """Called before the first prediction batch."""

    def on_predict_epoch_end(self) -> None:
        """Called after the last prediction batch."""

    def on_predict_batch_start(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called before a prediction batch."""

    def on_predict_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        """Called after a prediction batch."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add something to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read something from a checkpoint before the module's weights are loaded."""
