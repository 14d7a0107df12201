"""Finding the newest complete checkpoint of a folder."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from dstrat.checkpoint.portable.format import LAST, STATE
from dstrat.checkpoint.portable.reader import CheckpointReader, read_manifest
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dstrat.checkpoint.paths import Place
    from dstrat.checkpoint.portable.format import Manifest

_LONGEST_NAME = 1024
_ZIP = b"PK\x03\x04"
_SUFFIX = ".ckpt"
"""What a folder that cannot be looked into is called, if it is likely to be a checkpoint; others have folders too."""


def newest_checkpoint(folder: Place) -> Place | None:
    """Return the checkpoint of a folder that was completed last; None where there is no complete one.

    It is what the pointer names, or a later one by its steps and the clock, where a crash came between that and the
    pointer.  Where the pointer names nothing that is complete, it is the one with the most steps, and of those with as
    many the latest.  So nothing goes by the clock alone, which may have been set back.

    Raises:
        OSError: The store or disk fails, so that nobody knows which one it is.
    """
    created = {path: manifest.created_ns for path in _candidates(folder) if (manifest := _complete(path)) is not None}
    pointer = folder / LAST
    pointed = _target(pointer) if _is_pointer(pointer) else None
    if pointed not in created:
        return max(created, key=lambda path: (step_of(path) or 0, created[path], str(path)), default=None)
    later = [path for path, completed in created.items() if completed > created[pointed]]
    if not later:
        return pointed
    return max([pointed, *later], key=lambda path: (step_of(path) or 0, path in later, created[path], str(path)))


def step_of(path: Place) -> int | None:
    """Return after how many optimizer steps a checkpoint was saved; None where it does not say."""
    try:
        with CheckpointReader(path) as opened:
            step = opened.document(STATE).get("global_step")
    except StoreError:
        raise
    except CheckpointError:
        return None
    return step if isinstance(step, int) else None


def _candidates(folder: Place) -> list[Place]:
    if not folder.is_dir():
        return []
    found: Iterable[Place] = folder.iterdir()
    return [path for path in found if not path.name.startswith(".") and path.is_dir()]


def _complete(path: Place) -> Manifest | None:
    """Return the manifest of a checkpoint whose files are all there in their size; None where there is none."""
    try:
        sizes, manifest = storage_of(path).file_sizes(path), read_manifest(path)
    except StoreError:
        raise
    except (CheckpointError, FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:  # of the folder
        if path.suffix == _SUFFIX:
            raise
        return None
    is_whole = all(sizes.get(name) == record.size for name, record in manifest.files.items())
    return manifest if is_whole else None


def point_to(path: Place) -> None:
    """Let the pointer beside a checkpoint name it."""
    storage_of(path).replace_file(path.parent / LAST, path.name.encode() + b"\n")


def forget(path: Place) -> None:
    """Let the pointer beside a checkpoint that was removed name the newest that is left."""
    pointer = path.parent / LAST
    if not _is_pointer(pointer) or _target(pointer) != path:
        return
    newest = newest_checkpoint(path.parent)
    if newest is None:
        pointer.unlink(missing_ok=True)
    else:
        point_to(newest)


def resolved(path: Place) -> Place:
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


def is_portable(path: Place) -> bool:
    """Return whether a path is a checkpoint's folder, or the pointer to the newest one beside it."""
    if path.is_dir():
        return True
    return path.name == LAST and not is_zip(path)


def is_zip(path: Place) -> bool:
    """Return whether a file is a zip archive, as those of torch.save are."""
    with contextlib.suppress(OSError):
        return storage_of(path).read_start(path, len(_ZIP)) == _ZIP
    return False


def _is_pointer(path: Place) -> bool:
    return path.name == LAST and path.is_file()


def _target(pointer: Place) -> Place:
    name = storage_of(pointer).read_start(pointer, _LONGEST_NAME).removesuffix(b"\n").decode(errors="replace")
    if not name or name in (".", "..") or "/" in name or "\0" in name or "\\" in name:
        raise CheckpointError(f"{str(pointer)!r} does not name a checkpoint beside it: give the checkpoint's own path")
    return pointer.parent / name
