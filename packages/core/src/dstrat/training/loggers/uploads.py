"""Selection of the checkpoints that a logger uploads."""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from dstrat.builtin.checkpoint.place import place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from dstrat.builtin.checkpoint.place import Place


class Uploads:
    """Uploads the best checkpoint at the end, or each as soon as it is saved; from a store by way of this machine.

    Of several callbacks each has its best one; what the one that saved last sends bears the names in the end.

    Args:
        wanted: False for none, True for the best ones, ``"all"`` for each.
        upload: Sends a file or folder, with names for it.
    """

    def __init__(self, wanted: bool | Literal["all"], upload: Callable[[Path, list[str]], None]) -> None:
        self._wanted, self._upload = wanted, upload
        self._callbacks: list[Any] = []
        self._sent: set[str] = set()

    def take(self, checkpoint_callback: Any) -> None:
        """Take note of a callback that has saved checkpoints, of which some may replace what was sent."""
        self._callbacks = [other for other in self._callbacks if other is not checkpoint_callback]
        self._callbacks.append(checkpoint_callback)
        self._sent.difference_update(checkpoint_callback.saved_paths)
        if self._wanted == "all":
            for path in checkpoint_callback.saved_paths:
                is_best = path == checkpoint_callback.best_model_path
                self._send(path, ["latest", "best"] if is_best else ["latest"])

    def finish(self) -> None:
        """Upload the best one of each callback."""
        if self._wanted:
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
