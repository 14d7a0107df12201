"""Finding the newest complete checkpoint of a folder."""

from __future__ import annotations

import stat
from typing import TYPE_CHECKING

from dstrat.builtin.checkpoint.portable.folder import replace_file
from dstrat.builtin.checkpoint.portable.layout import LAST
from dstrat.builtin.checkpoint.portable.opened_folder import read_manifest
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.builtin.checkpoint.portable.manifest import Manifest

_LONGEST_NAME = 1024


def newest_checkpoint(folder: Path) -> Path | None:
    """Return the checkpoint of a folder that was completed last; None where there is no complete one.

    It goes by the manifests, so it finds one also when a crash came between it and the pointer.
    """
    found = [(manifest.created_ns, path) for path in _candidates(folder) if (manifest := _complete(path)) is not None]
    return max(found)[1] if found else None


def _candidates(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return [path for path in sorted(folder.iterdir()) if not path.name.startswith(".") and path.is_dir()]


def _complete(path: Path) -> Manifest | None:
    """Return the manifest of a checkpoint whose files are all there in their size."""
    try:
        manifest = read_manifest(path)
        for name, record in manifest.files.items():
            status = (path / name).lstat()
            if not stat.S_ISREG(status.st_mode) or status.st_size != record.size:
                return None
    except OSError:  # of which CheckpointError is one
        return None
    return manifest


def point_to(path: Path) -> None:
    """Let the pointer beside a checkpoint name it."""
    replace_file(path.parent / LAST, path.name.encode() + b"\n")


def forget(path: Path) -> None:
    """Let the pointer beside a checkpoint that was removed name the newest that is left."""
    pointer = path.parent / LAST
    if not _is_pointer(pointer) or _target(pointer) != path:
        return
    newest = newest_checkpoint(path.parent)
    if newest is None:
        pointer.unlink(missing_ok=True)
    else:
        point_to(newest)


def resolved(path: Path) -> Path:
    """Return the checkpoint that a path means: itself, or what the pointer at that path names.

    Where the pointer is missing, because of a crash between a checkpoint and it, the newest checkpoint is meant.

    Raises:
        CheckpointError: The pointer does not name a checkpoint beside it.
    """
    if _is_pointer(path):
        return _target(path)
    if path.name == LAST and not path.exists():
        return newest_checkpoint(path.parent) or path
    return path


def _is_pointer(path: Path) -> bool:
    return path.name == LAST and path.is_file()


def _target(pointer: Path) -> Path:
    with pointer.open("rb") as file:
        name = file.read(_LONGEST_NAME).removesuffix(b"\n").decode(errors="replace")
    if not name or name in (".", "..") or "/" in name or "\0" in name or "\\" in name:
        raise CheckpointError(f"{str(pointer)!r} does not name a checkpoint beside it: give the checkpoint's own path")
    return pointer.parent / name
