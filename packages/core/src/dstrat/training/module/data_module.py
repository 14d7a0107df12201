"""Loaders and what they need, in one object apart from the module."""

from __future__ import annotations

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
    """What downloads, splits and loads data.

    For example::

        class Digits(DataModule):
            def setup(self, stage):
                self.train, self.val = random_split(load_digits(), [0.9, 0.1])

            def train_dataloader(self):
                return DataLoader(self.train, batch_size=32, shuffle=True)

            def val_dataloader(self):
                return DataLoader(self.val, batch_size=32)

    Attributes:
        trainer: The Trainer that uses it, also after the run; None before one.
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
        """Return a data module whose loaders read these datasets.

        Args:
            train_dataset: What to train on, shuffled unless it is an iterable dataset; also a list or dict of several,
                and so for the others.
            val_dataset: What to validate on.
            test_dataset: What to test on.
            predict_dataset: What to predict.
            batch_size: Samples of a batch.
            num_workers: Processes that read each dataset.
            **init_kwargs: Arguments of the class.
        """
        datasets_by_source = {
            "train": train_dataset,
            "val": val_dataset,
            "test": test_dataset,
            "predict": predict_dataset,
        }
        module = cls(**init_kwargs)
        for source, datasets in datasets_by_source.items():
            if datasets is not None:
                make = partial(_loaders, datasets, source == "train", batch_size=batch_size, num_workers=num_workers)
                setattr(module, f"{source}_dataloader", make)
        return module

    def on_exception(self, exception: BaseException) -> None:
        """Called when the run breaks, also by Ctrl-C."""

    def attach(self, trainer: Trainer | None) -> None:
        """Take the Trainer that uses this data; None at the end of a run."""
        self.trainer = trainer

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "trainer": None}  # copies and pickles belong to no Trainer

    def state_dict(self) -> dict[str, Any]:
        """Return what must be in a checkpoint."""
        return {}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` returned."""


def _loaders(datasets: Any, shuffled: bool, **options: Any) -> Any:
    """Return the loader of a dataset, or of each in a list or dict."""
    from torch.utils.data import DataLoader, IterableDataset

    if isinstance(datasets, Mapping):
        return {name: _loaders(dataset, shuffled, **options) for name, dataset in datasets.items()}
    if isinstance(datasets, list | tuple):
        return [_loaders(dataset, shuffled, **options) for dataset in datasets]
    return DataLoader(datasets, shuffle=shuffled and not isinstance(datasets, IterableDataset), **options)
