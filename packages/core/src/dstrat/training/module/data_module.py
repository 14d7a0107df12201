"""Loaders and what they need, in one object apart from the module."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.training.module.hooks import DataHooks
from dstrat.training.module.hyperparameters import HyperparameterMethods
from dstrat.training.module.loading import DataModuleLoading

if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import Any

    from dstrat.training.trainer import Trainer


class DataModule(DataHooks, HyperparameterMethods, DataModuleLoading):
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
        trainer: The Trainer that uses it, None outside a run.
    """

    trainer: Trainer | None = None

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
