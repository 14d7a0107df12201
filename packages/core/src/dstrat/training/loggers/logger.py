"""Base class of loggers, and what their implementations share."""

from __future__ import annotations

import contextlib
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from typing_extensions import Self

from dstrat.checkpoint.paths import place
from dstrat.errors import MissingRequirementError, RequestError
from dstrat.plugins.known import pip_command
from dstrat.training.module.hyperparameters import fields_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from torch.nn import Module

    from dstrat.checkpoint.paths import Place
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
            users call there too are marked with :func:`~dstrat.training.loggers.logger.writer_only`.
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


# Restriction of writing to one process


M = TypeVar("M", bound="Callable[..., None]")


def writer_only(method: M) -> M:
    """Make a logger's method do nothing in the processes that do not write."""

    @wraps(method)
    def in_the_writer(self: Logger, /, *args: Any, **kwargs: Any) -> None:
        if self.writes:
            method(self, *args, **kwargs)

    return cast("M", in_the_writer)


class Silence:
    """What loggers return as ``experiment`` where they do not write: takes every call and does nothing."""

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Self:
        return self

    def __getitem__(self, key: Any) -> Self:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        pass


# Conversion of settings and values for loggers


def as_mapping(params: Any) -> Mapping[str, Any]:
    """Return the settings, which may be a mapping, a namespace or a dataclass, by name."""
    fields = fields_of(params)
    return vars(params) if fields is None else fields


def flatten(params: Any) -> dict[str, Any]:
    """Return the settings without nesting, as ``outer/inner``."""
    flat: dict[str, Any] = {}
    for name, value in as_mapping(params).items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": deeper for inner, deeper in flatten(value).items()}
        else:
            flat[str(name)] = value
    return flat


def as_numbers(metrics: Mapping[str, Any], prefix: str = "", separator: str = "-") -> dict[str, Any]:
    """Return values with a prefix before their names; tensors, which users log, as numbers."""
    start = f"{prefix}{separator}" if prefix else ""
    return {f"{start}{name}": value.item() if hasattr(value, "item") else value for name, value in metrics.items()}


def named_images(key: str, images: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield images with a name for each: the key for one, and ``key/0``, ``key/1`` ... for several.

    Raises:
        RequestError: There is no list of them.
    """
    if not isinstance(images, list | tuple):
        raise RequestError(f"log_image({key!r}) takes a list of images, and got {type(images).__name__}")
    for index, image in enumerate(images):
        yield (key if len(images) == 1 else f"{key}/{index}"), image


def as_pixels(image: Any) -> np.ndarray[Any, Any]:
    """Return an image as an array of height, width and channels, or of height and width.

    Args:
        image: A tensor of channels, height and width, or of height and width; an array; an image of PIL; a file's path.
    """
    import numpy as np
    from torch import Tensor

    if isinstance(image, Tensor):
        array: np.ndarray[Any, Any] = image.detach().cpu().numpy()
        return array.transpose(1, 2, 0) if array.ndim == 3 else array
    if isinstance(image, str | Path):
        from PIL import Image

        with Image.open(image) as opened:
            return np.asarray(opened)
    return np.asarray(image)


# Optional libraries


def require(library: str, feature: str, *, extra: str | None = None) -> None:
    """Check that a library is installed, without importing it.

    Args:
        library: The module to import.
        feature: What needs it.
        extra: The extra of dstrat that brings it; by default of the library's name.

    Raises:
        MissingRequirementError: It is not.
    """
    if find_spec(library) is None:
        raise MissingRequirementError(
            f"{feature} needs {library}, which is not installed: {pip_command(f'dstrat[{extra or library}]')}"
        )


# Upload of checkpoints


class Uploads:
    """Uploads the best checkpoint at the end, or each as soon as it is saved; from a store by way of this machine.

    Of several callbacks each has its best one; what the one that saved last sends bears the names in the end.

    Args:
        mode: False for none, True for the best ones, ``"all"`` for each.
        upload: Sends a file or folder, with names for it.
    """

    def __init__(self, mode: bool | Literal["all"], upload: Callable[[Path, list[str]], None]) -> None:
        self._mode, self._upload = mode, upload
        self._callbacks: list[Any] = []
        self._sent: set[str] = set()

    def take(self, checkpoint_callback: Any) -> None:
        """Take note of a callback that has saved checkpoints, of which some may replace what was sent."""
        self._callbacks = [other for other in self._callbacks if other is not checkpoint_callback]
        self._callbacks.append(checkpoint_callback)
        self._sent.difference_update(checkpoint_callback.saved_paths)
        if self._mode == "all":
            for path in checkpoint_callback.saved_paths:
                is_best = path == checkpoint_callback.best_model_path
                self._send(path, ["latest", "best"] if is_best else ["latest"])

    def finish(self) -> None:
        """Upload the best one of each callback."""
        if self._mode:
            for callback in self._callbacks:
                self._send(callback.best_model_path, ["latest", "best"])

    def _send(self, path: str, names: list[str]) -> None:
        if path and path not in self._sent:
            with _on_this_disk(place(path)) as local:
                self._upload(local, names)
            self._sent.add(path)


@contextlib.contextmanager
def _on_this_disk(where: Place) -> Iterator[Path]:
    """Yield a checkpoint's path; one in a store is copied for the time of the block."""
    if isinstance(where, Path):
        yield where
        return
    with tempfile.TemporaryDirectory(prefix="dstrat-") as folder:
        local = Path(folder, where.name)
        if where.is_dir():
            local.mkdir()
            for name in where.file_sizes():
                (where / name).download(local / name)
        else:
            where.download(local)
        yield local
