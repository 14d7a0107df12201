"""Data module: datasets and loaders in an object of their own."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from dstrat.training.module.hooks import DataHooks
from dstrat.training.module.hyperparameters import HyperparametersMixin
from dstrat.training.module.loading import DataModuleLoading

if TYPE_CHECKING:
    from typing import Any

    from typing_extensions import Self

    from dstrat.training.trainer import Trainer


class DataModule(DataHooks, HyperparametersMixin, DataModuleLoading):
    """Download, preparation and loaders of data, independent of a module.

    For example::

        class Digits(DataModule):
            def setup(self, stage):
                self.train, self.val = random_split(load_digits(), [0.9, 0.1])

            def train_dataloader(self):
                return DataLoader(self.train, batch_size=32, shuffle=True)

            def val_dataloader(self):
                return DataLoader(self.val, batch_size=32)

    Attributes:
        trainer: The Trainer of the current or last run; None before the first one.
    """

    trainer: Trainer | None = None

    @classmethod
    def from_datasets(
        cls,
        train_dataset: Any = None,
        val_dataset: Any = None,
        test_dataset: Any = None,
        predict_dataset: Any = None,
        batch_size: int = 1,
        num_workers: int = 0,
        **init_kwargs: Any,
    ) -> Self:
        """Return a data module with loaders of datasets.

        Each argument is a dataset, or a list or dict of several.

        Args:
            train_dataset: For training; shuffled unless it is an iterable dataset.
            val_dataset: For validation.
            test_dataset: For test.
            predict_dataset: For prediction.
            batch_size: Samples of a batch.
            num_workers: Worker processes of each loader.
            **init_kwargs: Arguments of the class, which gets ``batch_size`` and ``num_workers`` too if it takes them.
        """
        datasets_by_source = {
            "train": train_dataset,
            "val": val_dataset,
            "test": test_dataset,
            "predict": predict_dataset,
        }
        parameters = inspect.signature(cls).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        of_loaders = {"batch_size": batch_size, "num_workers": num_workers}
        of_class = {name: value for name, value in of_loaders.items() if takes_all or name in parameters}
        module = cls(**of_class, **init_kwargs)
        for source, datasets in datasets_by_source.items():
            if datasets is not None:
                # Not a lambda, which cannot be pickled for ranks in other processes.
                make = partial(_loaders, datasets, source == "train", batch_size=batch_size, num_workers=num_workers)
                setattr(module, f"{source}_dataloader", make)
        return module

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run fails or is interrupted, for example by Ctrl-C."""

    def attach(self, trainer: Trainer | None) -> None:
        """Set the Trainer; None at the end of a run."""
        self.trainer = trainer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}  # copies and pickles have no Trainer

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""


def _loaders(datasets: Any, shuffled: bool, **options: Any) -> Any:
    """Return the loader of a dataset, or of each in a list or dict."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(datasets, Mapping):
        return {name: _loaders(dataset, shuffled, **options) for name, dataset in datasets.items()}
    if isinstance(datasets, list | tuple):
        return [_loaders(dataset, shuffled, **options) for dataset in datasets]
    return DataLoader(datasets, shuffle=shuffled and not isinstance(datasets, IterableDataset), **options)
