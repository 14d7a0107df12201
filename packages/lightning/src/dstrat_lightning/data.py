"""LightningDataModules as DataModules."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat import DataModule
from dstrat_lightning.conversion import convert
from dstrat_lightning.trainer_view import TrainerView

if TYPE_CHECKING:
    from dstrat import Trainer


def adapt_data(datamodule: Any) -> DataModule:
    """Return a LightningDataModule as a DataModule: the same object, whose class derives from both."""
    return convert(datamodule, DataBridge)


class DataBridge(DataModule):
    """DataModule whose ``trainer`` has the names of Lightning's."""

    def attach(self, trainer: Trainer | None) -> None:
        """Take the Trainer, under the names of Lightning's."""
        self.trainer = None if trainer is None else TrainerView(trainer)  # type: ignore[assignment]  # stands for it
