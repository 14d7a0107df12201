"""Lightning's loggers as dstrat's."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat import Logger
from dstrat.training.module.plain_values import AttributeDict

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch.nn import Module


def adapt_logger(logger: Any) -> Logger:
    """Return a logger of Lightning's, or one that derives from its class, as a Logger."""
    return LightningLogger(logger)


def lightning_logger(logger: Any) -> Any:
    """Return the logger as the user passed it."""
    return logger.logger if isinstance(logger, LightningLogger) else logger


class LightningLogger(Logger):
    """A Logger that hands everything on to one of Lightning's.

    Args:
        logger: Lightning's.

    Attributes:
        logger: As it was given.
    """

    def __init__(self, logger: Any) -> None:
        self.logger = logger
        self._joined: Path | None = None  # rank 0's folder, which cannot be set in Lightning's loggers

    @property
    def name(self) -> str | None:
        return self.logger.name  # type: ignore[no-any-return]  # Lightning's

    @property
    def version(self) -> int | str | None:
        return self.logger.version  # type: ignore[no-any-return]  # Lightning's

    @property
    def save_dir(self) -> Path | None:
        return _path(getattr(self.logger, "save_dir", None))  # Fabric's base class has neither folder

    @property
    def log_dir(self) -> Path | None:
        return self._joined or _path(getattr(self.logger, "log_dir", None))

    def join(self, log_dir: Path | None) -> None:
        self._joined = log_dir

    @property
    def experiment(self) -> Any:
        return self.logger.experiment

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self.logger.log_metrics(dict(metrics), step)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        self.logger.log_hyperparams(AttributeDict(params))  # some loggers read attributes, as of Lightning's own type
        self.logger.save()  # as Lightning's Trainer does

    def log_graph(self, model: Module, input_array: Any = None) -> None:
        self.logger.log_graph(model, input_array)

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        from dstrat_lightning.callbacks import lightning_callback

        if hasattr(self.logger, "after_save_checkpoint"):  # Fabric's loggers have none
            self.logger.after_save_checkpoint(lightning_callback(checkpoint_callback))

    def save(self) -> None:
        self.logger.save()

    def finalize(self, status: str) -> None:
        self.logger.finalize(status)

    def __getattr__(self, name: str) -> Any:
        """Return what one kind of logger has beside these."""
        if name.startswith("__") or name == "logger":  # pickle and copy ask for them before there is a logger
            raise AttributeError(name)
        return getattr(self.logger, name)


def _path(folder: Any) -> Path | None:
    return None if folder is None else Path(folder)
