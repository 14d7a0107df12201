"""Default loggers of a Trainer, and calls of several loggers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.paths import local_folder
from dstrat.errors import LoggerError, RequestError
from dstrat.training.arguments import adapt, install_hint
from dstrat.training.loggers.logger import Logger, Silence

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.interfaces.strategy import Strategy


def complete_loggers(
    requested: Logger | Iterable[Logger] | bool | None,
    root_dir: CheckpointPath,
    strategy: Strategy,
    *,
    is_tried: bool = False,
) -> list[Logger]:
    """Return the loggers of a Trainer, each with its folder.

    Args:
        requested: One logger, a collection of several, True or None for the CSV logger, False for none.
        root_dir: Folder of loggers without one; if it is a URL, they take the working directory.
        strategy: Has the rank of this process; global rank 0 writes.
        is_tried: Whether the run is a trial, in which silent loggers replace all others.

    Raises:
        RequestError: A value is not a logger.
    """
    if requested is None or requested is True:
        from dstrat.training.loggers.csv_logger import CSVLogger

        requested = CSVLogger()
    if requested is False:
        return []
    # A str is a mistake: as an iterable it would be reported letter by letter.
    is_one = isinstance(requested, str | Logger) or not isinstance(requested, Iterable)
    passed: list[Any] = [requested] if is_one else list(requested)  # type: ignore[arg-type]  # it is known to be iterable
    loggers: list[Any] = [adapt(one, Logger) for one in passed]
    for logger in loggers:
        if not isinstance(logger, Logger):
            raise RequestError(
                f"logger={logger!r} is not a Logger, True or False{install_hint(logger) or ': pass CSVLogger(), say'}"
            )
    if is_tried:
        loggers = [SilentLogger() for _ in loggers]
    for logger in loggers:
        logger.root_dir = logger.root_dir or local_folder(root_dir)
        logger.writes = strategy.is_global_zero
    return loggers


# Logger of a trial run


class SilentLogger(Logger):
    """A logger that accepts every call of any logger and does nothing, for trial runs of code that uses one."""

    @property
    def experiment(self) -> Silence:
        return Silence()

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        pass

    def __getattr__(self, name: str) -> Silence:
        """Return a silent method for those of other loggers."""
        if name.startswith("__"):  # protocols, such as those of pickle and copy, look up their methods
            raise AttributeError(name)
        return Silence()


# Calls of several loggers, and agreement on their folders


def call_loggers(loggers: Sequence[Logger], method: str, *args: Any) -> None:
    """Call a method of every logger that writes in this process, also after a failure of another one.

    Raises:
        LoggerError: A logger failed; its error is the cause.
    """
    failed: list[tuple[Logger, Exception]] = []
    for logger in loggers:
        if logger.writes:
            try:
                getattr(logger, method)(*args)
            except Exception as error:  # noqa: BLE001 - raised below, with the logger's name
                failed.append((logger, error))
    if failed:
        messages = [_describe(logger, method, cause) for logger, cause in failed]
        raise LoggerError("; ".join(messages)) from failed[0][1]


def _describe(logger: Logger, name: str, cause: Exception) -> str:
    # A LoggerError is a sentence already.
    return f"{type(logger).__name__}.{name} failed: {cause if isinstance(cause, LoggerError) else repr(cause)}"


def agree_on_folders(loggers: Sequence[Logger], strategy: Strategy) -> Path | None:
    """Broadcast the folders of global rank 0's loggers, the only ones that write; collective.

    Returns:
        The folder of the first logger that has one.

    Raises:
        LoggerError: A logger cannot make its folder.
    """
    for logger in loggers:
        logger.writes = strategy.is_global_zero  # first: reading log_dir creates the folder in the process that writes
    folders: list[Path | None] = strategy.broadcast([_folder_of(logger) for logger in loggers])
    for logger, folder in zip(loggers, folders, strict=True):
        if not logger.writes:
            logger.join(folder)
    return next((folder for folder in folders if folder is not None), None)


def _folder_of(logger: Logger) -> Path | None:
    try:
        return logger.log_dir
    except Exception as error:
        raise LoggerError(_describe(logger, "log_dir", error)) from error
