"""Tuner: search for a learning rate or a batch size before a training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from dstrat.errors import MisuseError
from dstrat.training.callbacks.batch_size_finder import find_batch_size
from dstrat.training.callbacks.learning_rate_finder import find_learning_rate
from dstrat.training.loops.sources import DataSources

if TYPE_CHECKING:
    from dstrat.training.callbacks import batch_size_finder, learning_rate_finder
    from dstrat.training.loops.sources import Source
    from dstrat.training.module.data_module import DataModule
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class Tuner:
    """Search for a learning rate or a batch size, by short runs of a copy of the module.

    A search uses the Trainer's strategy, devices and settings, without its callbacks and loggers.  It changes nothing
    but the attribute with the result: random state, Trainer and module stay the same.  Hooks of a data module are
    called.

    Args:
        trainer: The Trainer of the training that follows.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def lr_find(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: Literal["fit"] = "fit",
        min_lr: float = 1e-8,
        max_lr: float = 1,
        num_training: int = 100,
        mode: learning_rate_finder.Mode = "exponential",
        early_stop_threshold: float | None = 4.0,
        update_attr: bool = True,
        attr_name: str = "",
    ) -> learning_rate_finder.LearningRateCurve | None:
        """Train with increasing learning rates, and set the one at which the loss decreases fastest.

        Args:
            model: The module.
            train_dataloaders: As for ``fit``.
            val_dataloaders: As for ``fit``; a search validates nothing.
            dataloaders: Must be None, as it is for other methods.
            datamodule: As for ``fit``.
            method: ``"fit"``, the only method with a learning rate.
            min_lr: The first rate.
            max_lr: The last rate.
            num_training: Number of optimizer steps.
            mode: ``"exponential"`` or ``"linear"`` increase.
            early_stop_threshold: Ratio of the smoothed loss to the best one at which the search ends; None is no limit.
            update_attr: Whether to set the module's attribute to the suggested rate.
            attr_name: The attribute of the module or of its ``hparams``; by default ``lr`` or ``learning_rate``.

        Returns:
            Losses and rates, with ``suggestion()`` and ``plot()``; None with ``fast_dev_run``.

        Raises:
            MisuseError: The module has no attribute for the rate, or not exactly one optimizer.
            RequestError: An argument is out of range.
        """
        if method != "fit":
            raise MisuseError(f"method={method!r} has no learning rate: lr_find works with method='fit'")
        sources = self._sources(method, model, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        return find_learning_rate(
            self._trainer,
            sources.module,
            sources,
            min_lr=min_lr,
            max_lr=max_lr,
            num_training=num_training,
            mode=mode,
            early_stop_threshold=early_stop_threshold,
            update_attr=update_attr,
            attr_name=attr_name,
        )

    def scale_batch_size(
        self,
        model: TrainModule,
        train_dataloaders: Any = None,
        val_dataloaders: Any = None,
        dataloaders: Any = None,
        datamodule: DataModule | None = None,
        method: batch_size_finder.Stage = "fit",
        mode: batch_size_finder.Mode = "power",
        steps_per_trial: int = 3,
        init_val: int = 2,
        max_trials: int = 25,
        batch_arg_name: str = "batch_size",
        margin: float = 0.05,
        max_val: int = 8192,
    ) -> int | None:
        """Run with increasing batch sizes, and set the largest one that fits into memory.

        Args:
            model: The module.
            train_dataloaders: An error, as a loader's batch size cannot change.
            val_dataloaders: An error too.
            dataloaders: An error too.
            datamodule: Makes loaders from its batch size, if the module does not.
            method: The method to run: ``"fit"``, ``"validate"``, ``"test"`` or ``"predict"``.
            mode: ``"power"`` doubles the size until memory is exhausted; ``"binsearch"`` then searches between the last
                two.
            steps_per_trial: Number of steps with each size.
            init_val: The first size.
            max_trials: Maximal number of sizes to try.
            batch_arg_name: The attribute of the module, the data module or the ``hparams`` of either.
            margin: Fraction by which ``"binsearch"`` reduces its result.
            max_val: The largest size to try.

        Returns:
            The size; None with ``fast_dev_run``.

        Raises:
            ConflictError: The run has several processes, or its loaders do not depend on the size.
            MisuseError: There is no attribute for the size, or no size fits into memory.
            RequestError: An argument is out of range.
        """
        sources = self._sources(method, model, train_dataloaders, val_dataloaders, dataloaders, datamodule)
        return find_batch_size(
            self._trainer,
            sources.module,
            sources,
            stage=method,
            mode=mode,
            steps_per_trial=steps_per_trial,
            init_val=init_val,
            max_trials=max_trials,
            batch_arg_name=batch_arg_name,
            margin=margin,
            max_val=max_val,
        )

    def _sources(
        self,
        method: str,
        model: TrainModule,
        train_dataloaders: Any,
        val_dataloaders: Any,
        dataloaders: Any,
        datamodule: DataModule | None,
    ) -> DataSources:
        passed: dict[str, dict[Source, Any]] = {
            "fit": {"train": train_dataloaders, "val": val_dataloaders},
            "validate": {"val": dataloaders},
            "test": {"test": dataloaders},
            "predict": {"predict": dataloaders},
        }
        if method not in passed:
            raise MisuseError(f"method={method!r} is not known: choose 'fit', 'validate', 'test' or 'predict'")
        if method == "fit" and dataloaders is not None:
            raise MisuseError("dataloaders is for method='validate', 'test' and 'predict': pass train_dataloaders")
        return DataSources(model, datamodule, passed[method])
