"""Base class of loggers, and functions that their implementations share."""

from __future__ import annotations

import contextlib
import math
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import wraps
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, TypeVar, cast

from typing_extensions import Self

from dstrat.checkpoint.paths import as_path
from dstrat.errors import MissingRequirementError, MisuseError, RequestError
from dstrat.interfaces.keywords import NamedArguments
from dstrat.interfaces.retired_members import RetiredMembers
from dstrat.plugins.known import pip_command
from dstrat.training.module.plain_values import fields_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from torch.nn import Module

    from dstrat.checkpoint.paths import CheckpointPath


class SavedCheckpoints(Protocol):
    """The checkpoints of a callback: the attributes of a ModelCheckpoint that loggers read."""

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint; empty before the first one."""

    @property
    def saved_paths(self) -> list[str]:
        """Paths of the last save."""


class Logger(NamedArguments, RetiredMembers, ABC):
    """A destination of logged values.  Only global rank 0 writes; the first write opens files.

    The smallest complete subclass::

        class PrintLogger(Logger):
            def log_metrics(self, metrics, step):
                print(step, metrics)

    An exception in one of its methods ends the run, with an error that names the logger.

    Attributes:
        root_dir: The folder of all runs; None is the Trainer's ``default_root_dir``.
        writes: Whether this process writes.  The Trainer calls no logger in other processes; methods that users call
            there are decorated with :func:`~dstrat.training.loggers.logger.writer_only`.
    """

    retired_members: ClassVar[Mapping[str, str]] = {
        "group_separator": "values keep the names that they were logged with"
    }
    root_dir: Path | None = None
    writes: bool = True

    @property
    def name(self) -> str | None:
        """The name that several runs share; None for a logger without one."""
        return None

    @property
    def version(self) -> int | str | None:
        """The identifier of this run among those with its name; None if there is none, or not yet."""
        return None

    @property
    def save_dir(self) -> Path | None:
        """The folder of all runs: ``root_dir``."""
        return self.root_dir

    @property
    def log_dir(self) -> Path | None:
        """The folder of this run; None for a logger without one, or before it is known."""
        return None

    @property
    def metrics_file(self) -> Path | None:
        """The CSV file with the values of this run, for ``dstrat plot``; None for a logger without one."""
        return None

    @property
    def has_fixed_version(self) -> bool:
        """Whether the user chose the version, so that other versions are other trainings and not earlier runs."""
        return isinstance(self.version, str)

    def join(self, log_dir: Path | None) -> None:
        """Set the folder of global rank 0, in a process that does not write."""

    def bookmark(self) -> Any:
        """Return the position after the last logged value, as a value for JSON; None without :meth:`rewind`.

        The Trainer calls it for each checkpoint, with ``max_restarts``.
        """
        return None

    def rewind(self, bookmark: Any) -> None:
        """Remove the values after a bookmark, of a failed attempt; called before anything else is logged."""

    @property
    def experiment(self) -> Any:
        """The library's own object, for features that this class lacks; None without one."""
        return None

    @abstractmethod
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Write values by name.

        Args:
            metrics: Numbers; from the Trainer plain Python numbers.
            step: Number of optimizer steps taken; for values of evaluation steps the number of evaluated batches.  The
                Trainer always passes it.
        """

    def start_run(self) -> None:
        """Start a run; called by the Trainer after the strategy's setup."""

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write the hyperparameters of a run."""

    def log_graph(self, model: Module, input_array: Any = None) -> None:
        """Write the graph of a module; called by the Trainer at the start of a run, before the strategy's setup.

        Args:
            model: The module.
            input_array: Input of its ``forward``; by default the module's ``example_input_array``.
        """

    def after_save_checkpoint(self, checkpoint_callback: SavedCheckpoints) -> None:
        """Called after a ModelCheckpoint has saved its ``saved_paths``."""

    def save(self) -> None:
        """Flush written values to the disk."""

    def finalize(self, status: str) -> None:
        """Close files and connections; the status is success, failed or interrupted."""


# Restriction of writing to one process


M = TypeVar("M", bound="Callable[..., None]")


def writer_only(method: M) -> M:
    """Make a method of a logger do nothing in processes that do not write."""

    @wraps(method)
    def in_the_writer(self: Logger, /, *args: Any, **kwargs: Any) -> None:
        if self.writes:
            method(self, *args, **kwargs)

    return cast("M", in_the_writer)


class Silence:
    """The ``experiment`` of loggers in processes that do not write: it accepts every call and does nothing."""

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):  # protocols, such as those of pickle and copy, look up their methods
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


# Conversion of hyperparameters and values for loggers


def as_mapping(params: Any) -> Mapping[str, Any]:
    """Return the items of hyperparameters, which may be a mapping, a namespace or a dataclass, by name."""
    fields = fields_of(params)
    return vars(params) if fields is None else fields


def flatten(params: Any) -> dict[str, Any]:
    """Return nested hyperparameters as a flat dict with names such as ``outer/inner``."""
    flat: dict[str, Any] = {}
    for name, value in as_mapping(params).items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": deeper for inner, deeper in flatten(value).items()}
        else:
            flat[str(name)] = value
    return flat


def as_numbers(
    metrics: Mapping[str, Any], prefix: str = "", separator: str = "-", *, keeps_arrays: bool = False
) -> dict[str, Any]:
    """Return values as numbers, with a prefix before their names.

    Args:
        metrics: The values by name: numbers, tensors and arrays.
        prefix: The prefix.
        separator: What is between the prefix and a name.
        keeps_arrays: Whether arrays with several elements are returned as they are; otherwise they are an error.

    Raises:
        MisuseError: A value has several elements.
    """
    start = f"{prefix}{separator}" if prefix else ""
    numbers: dict[str, Any] = {}
    for name, value in metrics.items():
        shape = tuple(getattr(value, "shape", ()))
        if not hasattr(value, "item") or (keeps_arrays and math.prod(shape) != 1):
            numbers[f"{start}{name}"] = value
        elif math.prod(shape) == 1:
            numbers[f"{start}{name}"] = value.item()
        else:
            raise MisuseError(
                f"log_metrics({{{name!r}: ...}}) got a value of shape {shape}: pass a number for each name, such as "
                "value.mean()"
            )
    return numbers


def named_images(key: str, images: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """Yield pairs of a name and an image: the key for one image, and ``key/0``, ``key/1`` ... for several.

    Raises:
        RequestError: The images are not a list.
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
        return array.transpose(1, 2, 0) if array.ndim == 3 else array  # torch has channels first
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
        feature: The feature that needs it, for the message.
        extra: The extra of dstrat with the library; by default the library's name.

    Raises:
        MissingRequirementError: The library is not installed.
    """
    if find_spec(library) is None:
        raise MissingRequirementError(
            f"{feature} needs {library}, which is not installed: {pip_command(f'dstrat[{extra or library}]')}"
        )


# Upload of checkpoints


class Uploads:
    """Uploads of the best checkpoint at the end, or of each checkpoint after its save.

    Each of several callbacks uploads its best checkpoint; the names then belong to the callback that saved last.

    Args:
        mode: False uploads none, True the best ones, ``"all"`` each.
        upload: Uploads a local file or folder, with its names.
    """

    def __init__(self, mode: bool | Literal["all"], upload: Callable[[Path, list[str]], None]) -> None:
        self._mode, self._upload = mode, upload
        self._callbacks: list[SavedCheckpoints] = []
        self._sent: set[str] = set()

    def take(self, checkpoint_callback: SavedCheckpoints) -> None:
        """Register a callback after a save, which may have overwritten a checkpoint that was uploaded."""
        # At the end, so that "latest" belongs to the callback that has saved last.
        self._callbacks = [other for other in self._callbacks if other is not checkpoint_callback]
        self._callbacks.append(checkpoint_callback)
        self._sent.difference_update(checkpoint_callback.saved_paths)
        if self._mode == "all":
            for path in checkpoint_callback.saved_paths:
                is_best = path == checkpoint_callback.best_model_path
                self._send(path, ["latest", "best"] if is_best else ["latest"])

    def finish(self) -> None:
        """Upload the best checkpoint of each callback."""
        if self._mode:
            for callback in self._callbacks:
                self._send(callback.best_model_path, ["latest", "best"])

    def _send(self, path: str, names: list[str]) -> None:
        if path and path not in self._sent:
            with _local_copy(as_path(path)) as local:
                self._upload(local, names)
            self._sent.add(path)


@contextlib.contextmanager
def _local_copy(path: CheckpointPath) -> Iterator[Path]:
    """Yield the local path of a checkpoint, or of a temporary copy of one in a store."""
    if isinstance(path, Path):
        yield path
        return
    with tempfile.TemporaryDirectory(prefix="dstrat-") as folder:
        local = Path(folder, path.name)
        if path.is_dir():
            local.mkdir()
            for name in path.file_sizes():
                (path / name).download(local / name)
        else:
            path.download(local)
        yield local
