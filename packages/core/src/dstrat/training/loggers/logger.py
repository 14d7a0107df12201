"""The base class of loggers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch.nn import Module

    from dstrat.training.callbacks.callback import Callback


class Logger(ABC):
    """Where logged values are written.  Only global rank 0 writes; files are opened by the first write.

    The smallest complete subclass::

        class PrintLogger(Logger):
            def log_metrics(self, metrics, step):
                print(step, metrics)

    An exception in one of its methods ends the run, with the logger's name.

    Attributes:
        root_dir: The folder that holds everything of this logger; None takes the trainer's ``default_root_dir``.
        writes: Whether this process is the one that writes.  In the others the Trainer calls no logger; methods that
            users call there too are marked with :func:`~dstrat.training.loggers.writer.writer_only`.
    """

    root_dir: Path | None = None
    writes: bool = True

    @property
    def name(self) -> str | None:
        """The name that several runs share, None for a logger without one."""
        return None

    @property
    def version(self) -> int | str | None:
        """What tells this run from others of its name; None where there is nothing, or it is not known yet."""
        return None

    @property
    def save_dir(self) -> Path | None:
        """The folder that holds everything of this logger: its ``root_dir``."""
        return self.root_dir

    @property
    def log_dir(self) -> Path | None:
        """The folder of this run; None for a logger that writes elsewhere, or where it is not known yet."""
        return None

    def join(self, log_dir: Path | None) -> None:
        """Take the folder that global rank 0 writes to, in a process that does not write."""

    @property
    def experiment(self) -> Any:
        """The object of the library that writes, for what this class does not offer; None without one."""
        return None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write values by name.

        Args:
            metrics: Numbers; those that the Trainer logs are plain.
            step: Number of optimizer steps taken; of values of evaluation steps, the number of batches evaluated.  The
                Trainer always gives it.
        """

    def start_run(self) -> None:
        """Begin a run; the Trainer calls it when the strategy has set the module up."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the settings of a run."""

    def log_graph(self, model: Module, input_array: Any = None) -> None:
        """Write the graph of a module; the Trainer calls it when a run starts, before the strategy wraps the module.

        Args:
            model: The module.
            input_array: The input of its ``forward``; by default the module's ``example_input_array``.
        """

    def after_save_checkpoint(self, checkpoint_callback: Callback) -> None:
        """Take note of what a ModelCheckpoint has just saved: its ``saved_paths``."""

    def save(self) -> None:
        """Bring what was written to the disk."""

    def finalize(self, status: str) -> None:
        """Close what was opened; the status is success, failed or interrupted."""
