"""The newest complete checkpoint of a folder, and the pointer to it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.portable.format import LAST, STATE
from dstrat.checkpoint.portable.reader import CheckpointReader, read_manifest
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.errors import CheckpointError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.checkpoint.portable.format import Manifest
    from dstrat.checkpoint.portable.storage import Storage

_LONGEST_NAME = 1024
_ZIP = b"PK\x03\x04"
_SUFFIX = ".ckpt"
"""The suffix of a folder that is probably a checkpoint, even if this process has no access to it."""


def newest_checkpoint(folder: CheckpointPath) -> CheckpointPath | None:
    """Return the complete checkpoint of a folder that was saved last; None if there is none.

    That is the one that the pointer names, or a later one with more steps, if a crash came before the pointer was
    updated.  Without a valid pointer it is the one with the most steps, and of equal ones the latest.

    Raises:
        OSError: The store or disk fails, so that the newest checkpoint is not known.
    """
    created = {path: manifest.created_ns for path in _candidates(folder) if (manifest := _complete(path)) is not None}
    pointer = folder / LAST
    # The pointer decides, and not the clock, which may have been set back between two saves.
    pointed = _target(pointer) if _is_pointer(pointer) else None
    if pointed not in created:
        return max(created, key=lambda path: (step_of(path) or 0, created[path], str(path)), default=None)
    later = [path for path, completed in created.items() if completed > created[pointed]]
    if not later:
        return pointed
    return max([pointed, *later], key=lambda path: (step_of(path) or 0, path in later, created[path], str(path)))


def step_of(path: CheckpointPath) -> int | None:
    """Return the number of optimizer steps before a checkpoint was saved; None if it has no ``global_step``."""
    try:
        with CheckpointReader(path) as reader:
            step = reader.document(STATE).get("global_step")
    except StoreError:  # a CheckpointError too, but about the store: the checkpoint may be complete
        raise
    except CheckpointError:
        return None
    return step if isinstance(step, int) else None


def _candidates(folder: CheckpointPath) -> list[CheckpointPath]:
    if not folder.is_dir():
        return []
    paths: Iterable[CheckpointPath] = folder.iterdir()
    return [path for path in paths if not path.name.startswith(".") and path.is_dir()]  # unfinished ones have a dot


def is_complete(path: CheckpointPath) -> bool:
    """Return whether all files of a checkpoint exist with their sizes."""
    return _complete(path) is not None


def _complete(path: CheckpointPath) -> Manifest | None:
    """Return the manifest of a checkpoint if all its files exist with their sizes; otherwise None."""
    try:
        sizes, manifest = storage_of(path).file_sizes(path), read_manifest(path)
    except StoreError:  # unknown, and not incomplete: an older checkpoint must not be taken for the newest
        raise
    except (CheckpointError, FileNotFoundError, NotADirectoryError):  # or another process has removed it meanwhile
        return None
    except PermissionError:  # other people's folders may be beside the checkpoints
        if path.suffix == _SUFFIX:
            raise
        return None
    is_complete = all(sizes.get(name) == record.size for name, record in manifest.files.items())
    return manifest if is_complete else None


def point_to(path: CheckpointPath, storage: Storage[Any]) -> None:
    """Write the checkpoint's name into the pointer beside it."""
    pointer = path.parent / LAST
    if storage.is_local and pointer.is_dir():  # a checkpoint of this name; the newest one is found without a pointer
        return
    # surrogateescape, here and in _target: names on a disk need not be UTF-8.
    storage.replace_file(pointer, path.name.encode(errors="surrogateescape") + b"\n")


def forget(path: CheckpointPath) -> None:
    """Update the pointer beside a removed checkpoint: it names the newest one that remains, or is removed too."""
    pointer = path.parent / LAST
    if not _is_pointer(pointer) or _target(pointer) != path:
        return
    newest = newest_checkpoint(path.parent)
    if newest is None:
        pointer.unlink(missing_ok=True)
    else:
        point_to(newest, storage_of(newest))


def resolve(path: CheckpointPath) -> CheckpointPath:
    """Return the checkpoint at a path: the path itself, or the target of the pointer at that path.

    Programs that were written for files name ``last.ckpt``; where the last checkpoint has another name, the pointer
    beside it has that name.

    Raises:
        CheckpointError: The pointer does not name a checkpoint beside it.
    """
    if path.name == LAST + _SUFFIX and _is_pointer(path.parent / LAST) and not path.exists():
        path = path.parent / LAST
    if _is_pointer(path):
        return _target(path)
    if path.name == LAST and not path.exists():  # a crash came after the first checkpoint, before its pointer
        return newest_checkpoint(path.parent) or path
    return path


def is_portable(path: CheckpointPath) -> bool:
    """Return whether a path is the folder of a portable checkpoint, or the pointer to one."""
    if path.is_dir():
        return True
    return path.name == LAST and not is_zip(path)  # a file of torch.save may be called "last" too


def is_zip(path: CheckpointPath) -> bool:
    """Return whether a file is a zip archive, which is the format of torch.save."""
    with contextlib.suppress(OSError):
        return storage_of(path).read_start(path, len(_ZIP)) == _ZIP
    return False


def _is_pointer(path: CheckpointPath) -> bool:
    return path.name == LAST and path.is_file()


def _target(pointer: CheckpointPath) -> CheckpointPath:
    content = storage_of(pointer).read_start(pointer, _LONGEST_NAME)
    name = content.removesuffix(b"\n").decode(errors="surrogateescape")
    # It must not lead out of its folder, whoever wrote it.
    if not name or name in (".", "..") or "/" in name or "\0" in name or "\\" in name:
        raise CheckpointError(f"{str(pointer)!r} does not name a checkpoint beside it: give the checkpoint's own path")
    return pointer.parent / name
