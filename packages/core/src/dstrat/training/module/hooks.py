"""Hooks that modules and data modules may override; most do nothing by default."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import torch
    from torch import Tensor
    from torch.nn import Module
    from torch.optim import Optimizer

    from dstrat.interfaces.pipeline import Pipeline


class DataHooks:
    """Hooks of data: preparation, loaders, and transfer of batches to the device."""

    def prepare_data(self) -> None:
        """Download or write data; called in one process of each machine, while the others wait."""

    def setup(self, stage: str) -> None:
        """Prepare for a stage (fit, validate, test or predict); called in every process."""

    def teardown(self, stage: str) -> None:
        """Free the resources of :meth:`setup`."""

    def train_dataloader(self) -> Any:
        """Return the training loader, or a structure of several."""

    def val_dataloader(self) -> Any:
        """Return the validation loader, or a list of several."""

    def test_dataloader(self) -> Any:
        """Return the test loader, or a list of several."""

    def predict_dataloader(self) -> Any:
        """Return the prediction loader, or a list of several."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch to transfer to the device."""
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        """Return a batch on the device; override it for batches of custom types."""
        from dstrat.interfaces.batch import move_to_device

        return move_to_device(batch, device)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        """Return a batch for the step, from one on the device."""
        return batch


class ModuleHooks:
    """Hooks of a module in training and evaluation."""

    if TYPE_CHECKING:

        def eval(self) -> Any: ...

        def zero_grad(self, set_to_none: bool = True) -> None: ...

    def configure_callbacks(self) -> Any:
        """Return one or several callbacks of the module; they replace the Trainer's callbacks of the same class."""
        return []

    def configure_model(self) -> None:
        """Create layers, with devices and processes known; called in every process before the strategy's setup."""

    def configure_pipeline(self) -> Pipeline:
        """Return the layers in order and the loss, for a strategy that divides the module into stages.

        Raises:
            MisuseError: The module does not define it.
        """
        raise MisuseError(
            f"{type(self).__name__} has no configure_pipeline, which a pipeline (pp) needs: define it to return "
            "dstrat.Pipeline(model=self.net, loss=lambda output, batch: mse_loss(output, batch[1]))"
        )

    def configure_experts(self) -> Sequence[Module]:
        """Return the layers of experts, for a strategy that divides them over ranks.

        They are called as the ``...Experts`` of transformers are, ``experts(tokens, index, weights)``, and return the
        weighted sum of the chosen experts' outputs for each token:

        - ``tokens``: ``(tokens, width)``
        - ``index``: the numbers of each token's experts, ``(tokens, choices)``, integers
        - ``weights``: the factors of their outputs, ``(tokens, choices)``

        The first dimension of each parameter is the experts.  A rank calls the layer with those that it has, which are
        numbered from 0 on; an attribute ``num_experts`` of the layer is their number then.

        Raises:
            MisuseError: The module does not define it.
        """
        raise MisuseError(
            f"{type(self).__name__} has no configure_experts, which experts (ep) need: define it to return the layers "
            "that are called as experts(tokens, index, weights), such as [block.experts for block in self.blocks]"
        )

    def keep_layers(self, count: int) -> Mapping[str, tuple[int, int]]:
        """Remove layers that repeat but for the first ones, for ``dstrat verify --layers``.

        Those of an ``nn.ModuleList``, ``nn.Sequential`` or ``nn.ModuleDict`` that follow one another with the same
        classes and shapes are removed.  A module that counts its layers elsewhere changes that number too::

            def keep_layers(self, count):
                self.num_layers = count
                return super().keep_layers(count)

        Args:
            count: How many layers of each list stay; of a pattern of several, how often it stays.

        Returns:
            The numbers of layers before and after of each list that was cut, by its name.
        """
        from dstrat.training.module.repeated_layers import keep_repeated_layers

        return keep_repeated_layers(cast("Module", self), count)

    def on_fit_start(self) -> None:
        """Called at the start of a fit."""

    def on_fit_end(self) -> None:
        """Called at the end of a fit."""

    def on_train_start(self) -> None:
        """Called before the first epoch, after the sanity check."""

    def on_train_end(self) -> None:
        """Called after the last epoch."""

    def on_train_epoch_start(self) -> None:
        """Called before an epoch's first batch."""

    def on_train_epoch_end(self) -> None:
        """Called after an epoch's last batch and its validation."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        """Called before a training batch; return -1 to skip the batch and the rest of the epoch.

        If one rank returns -1, the epoch ends on all of them.  Ranks communicate before each batch for this, unless the
        method is annotated with ``-> None``.
        """

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Called after a training batch; ``outputs`` is a dict with the ``"loss"`` (see the callback's hook)."""

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        """Called before gradients are cleared."""

    def on_before_backward(self, loss: Tensor) -> None:
        """Called before the backward pass."""

    def on_after_backward(self) -> None:
        """Called after the backward pass; gradients may still be scaled."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        """Called before clipping and the optimizer's step, with unscaled gradients."""

    def on_validation_model_zero_grad(self) -> None:
        """Free the gradients before validation in a fit, unless they are being accumulated."""
        self.zero_grad()

    def on_validation_model_eval(self) -> None:
        """Put the module into evaluation mode, before validation."""
        self.eval()

    def on_validation_model_train(self) -> None:
        """Called after validation, when each submodule has its previous mode again."""

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
        """Called after testing, when each submodule has its previous mode again."""

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
        """Called after prediction, when each submodule has its previous mode again."""

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
        """Add entries to a checkpoint before it is written."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Read entries of a checkpoint before the module's weights are loaded."""
