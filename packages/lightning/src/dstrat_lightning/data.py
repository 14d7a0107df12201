"""LightningDataModules as DataModules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat import DataModule
from dstrat_lightning.conversion import convert
from dstrat_lightning.internals import take_hyperparameters
from dstrat_lightning.trainer_view import TrainerView

if TYPE_CHECKING:
    from dstrat import Trainer


def adapt_data(datamodule: Any) -> DataModule:
    """Return a LightningDataModule as a DataModule: the same object, whose class derives from both."""
    return convert(datamodule, DataBridge)


class DataBridge(DataModule):
    """What a LightningDataModule has in another way than a DataModule."""

    def take_over(self) -> None:
        """Take the hyperparameters that Lightning has saved."""
        take_hyperparameters(self)

    def attach(self, trainer: Trainer | None) -> None:
        """Take the Trainer, as Lightning's programs know it."""
        self.trainer = None if trainer is None else TrainerView(trainer)  # type: ignore[assignment]  # stands for it
