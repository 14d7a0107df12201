"""Callback that saves the configuration with the logs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from typing_extensions import override

from dstrat.errors import ConflictError
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from pathlib import Path

    from jsonargparse import Namespace

    from dstrat.cli.training.parser import DstratArgumentParser
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer


class SaveConfigCallback(Callback):
    """Writes the configuration of a :class:`DstratCLI` into the folder of the logs, once, in global rank 0.

    Without a logger that has a folder, that of a fit is written to ``default_root_dir``, and others are not.

    Args:
        parser: The parser that has read the configuration.
        config: The configuration.
        config_filename: Name of the file.
        overwrite: Whether a file with another configuration is replaced; by default it is an error.
        save_to_log_dir: Whether the file is written; False leaves only :meth:`save_config`, for subclasses.

    Attributes:
        text: What is written: the configuration, without the targets of links.
    """

    def __init__(
        self,
        parser: DstratArgumentParser,
        config: Namespace,
        config_filename: str = "config.yaml",
        overwrite: bool = False,
        save_to_log_dir: bool = True,
    ) -> None:
        self.parser, self.config = parser, config
        self.text: str = parser.dump(config, skip_unset=False)
        self.config_filename, self.overwrite = config_filename, overwrite
        self.save_to_log_dir = save_to_log_dir
        self.already_saved = False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "parser": None, "config": None}  # a user's parser may hold objects without pickle

    @override
    def setup(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        if self.already_saved or not trainer.is_global_zero:
            return
        has_folder = any(logger.log_dir for logger in trainer.loggers)
        if self.save_to_log_dir and (has_folder or stage == "fit"):
            self._write(trainer.log_dir)
        self.save_config(trainer, module, stage)
        self.already_saved = True

    def _write(self, folder: Path) -> None:
        path = folder / self.config_filename
        folder.mkdir(parents=True, exist_ok=True)
        if path.exists() and not self.overwrite:
            if path.read_text(encoding="utf-8") == self.text:  # of the same run, which is resumed
                return
            raise ConflictError(
                f"{path} has the configuration of another run, which is not overwritten: choose another version of the "
                "logger or another default_root_dir, or pass save_config_kwargs={'overwrite': True}, or "
                "save_config_callback=None to save none"
            )
        path.write_text(self.text, encoding="utf-8")

    def save_config(self, trainer: Trainer, module: TrainModule, stage: str) -> None:
        """Save the configuration elsewhere too; called in global rank 0 alone, so that it must not communicate."""
