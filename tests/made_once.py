"""A folder that takes long to fill, and that the workers of pytest-xdist share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from filelock import FileLock

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import pytest


def made_once(
    make: Callable[[Path], object], name: str, tmp_path_factory: pytest.TempPathFactory, worker_id: str
) -> Path:
    """Return a folder that the first worker to ask for it has filled; the others wait until then.

    Args:
        make: Fills the folder.
        name: Its name, for which nobody else in the tests asks.
        tmp_path_factory: The fixture of pytest.
        worker_id: The fixture of pytest-xdist.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / name
    made = folder / "made"
    with FileLock(folder.with_suffix(".lock")):
        if not made.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            made.touch()
    return folder
