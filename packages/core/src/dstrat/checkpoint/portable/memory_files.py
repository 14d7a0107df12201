"""Files of checkpoints in the memory of a machine: a folder for each job, and pages that are used again."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import stat
import struct
from pathlib import Path
from typing import TYPE_CHECKING

from dstrat.checkpoint.paths import as_path
from dstrat.checkpoint.portable.local_files import OutputFile, UnfinishedFolder, is_at, remove_folder
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dstrat.checkpoint.paths import CheckpointPath

MEMORY_VARIABLE = "DSTRAT_MEMORY_DIR"
"""Environment variable of the folder in memory, for machines that have another one than ``/dev/shm``."""

_OWNER = "owner"
"""The file in the folder of a job that its ranks have locked while they run."""
_LOCK = "hhqqi0q"  # of Linux: type, whence, start, length, process
_SPARE = ".spare"
"""The folder of superseded files, whose pages the next checkpoint is written to."""
_claimed_folders: set[Path] = set()
"""Those of this process: to open and close such a file would release its lock."""
_NOT_IN_NAMES = re.compile(r"[^\w-]")


# Folders: each folder of checkpoints has one in memory, at the same path below a root, with a folder for each job


def memory_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Return the folder in memory that all users share."""
    return Path(environ.get(MEMORY_VARIABLE) or "/dev/shm").absolute()  # noqa: S108 - the root below it is private


def memory_root() -> Path:
    """Return the root of this user's checkpoints in memory."""
    return memory_dir() / f"dstrat-{os.geteuid()}"


def is_in_memory(path: str | CheckpointPath) -> bool:
    """Return whether a checkpoint is in memory."""
    local = as_path(path)
    return isinstance(local, Path) and local.is_relative_to(memory_root())


def folder_in_memory(folder: CheckpointPath) -> Path:
    """Return the folder in memory that belongs to a folder of checkpoints."""
    return memory_root() / str(folder.absolute()).replace("://", "/").lstrip("/")


def make_memory_root() -> None:
    """Create the root of checkpoints in memory, which only this user can change.

    Raises:
        CheckpointError: The machine has no such memory, or another user has created the root.
    """
    if not memory_dir().is_dir():
        raise CheckpointError(
            f"InMemoryCheckpoint writes to {str(memory_dir())!r}, which this system does not have: set "
            f"{MEMORY_VARIABLE} to a folder in memory, or save to a disk, "
            "ModelCheckpoint(every_n_train_steps=..., async_save=True)"
        )
    root = memory_root()
    root.mkdir(mode=0o700, exist_ok=True)
    if not _is_private(root):
        raise CheckpointError(
            f"InMemoryCheckpoint writes to {str(root)!r}, which another user has created or may change: remove it, or "
            "leave InMemoryCheckpoint out"
        )


def _is_private(root: Path) -> bool:
    try:
        status = root.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o022


def job_folder_name(job_id: str | None, token: str) -> str:
    """Return the name of a job's folder.

    Args:
        job_id: What a restart of the job has in common with it; None if that is not known.
        token: Of this attempt, which no other has.
    """
    return token if job_id is None else f"{_NOT_IN_NAMES.sub('_', job_id)}.{token}"


def existing_in_memory(folders: Iterable[CheckpointPath], job_id: str | None = None) -> list[Path]:
    """Return the folders in memory of jobs that do not run, which belong to folders of checkpoints.

    If earlier attempts of a job have checkpoints, theirs are the only ones.

    Args:
        folders: The folders of checkpoints.
        job_id: Of the job that looks for them; None if it is not known.
    """
    ended = ended_in_memory(folders)
    # Not an attempt that was killed in its first save: it was resumed from one of another job, perhaps.
    return [path for path in ended if is_attempt(path, job_id) and any(path.glob("*.ckpt"))] or ended


def ended_in_memory(folders: Iterable[CheckpointPath]) -> list[Path]:
    """Return the folders in memory of all jobs that do not run, which belong to folders of checkpoints."""
    if not _is_private(memory_root()):
        return []
    return [path for folder in folders for path in _job_folders(folder) if not _is_claimed(path)]


def is_attempt(path: Path, job_id: str | None) -> bool:
    """Return whether a folder in memory is of an attempt of a job."""
    return job_id is not None and path.name.startswith(job_folder_name(job_id, ""))


def attempts_in_memory(folder: CheckpointPath, job_id: str | None) -> list[Path]:
    """Return the folders in memory of the ended attempts of a job, which belong to a folder of checkpoints."""
    # Another step of a scheduler's job may run beside this one.
    return [path for path in _job_folders(folder) if is_attempt(path, job_id) and not _is_claimed(path)]


def _job_folders(folder: CheckpointPath) -> list[Path]:
    parent = folder_in_memory(folder)
    return [path for path in sorted(parent.iterdir()) if (path / _OWNER).is_file()] if parent.is_dir() else []


class JobFolder:
    """The folder in memory of a running job, which other jobs leave alone until all of its ranks have ended.

    Args:
        path: The folder, which all ranks of the machine claim.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor: int | None = None
        while self._descriptor is None:  # again if another job has removed the folder before it was claimed
            path.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileNotFoundError):
                self._descriptor = _claim(path / _OWNER)
        _claimed_folders.add(path)
        _remove_abandoned(path.parent)

    def release(self, *, removes: bool) -> None:
        """Release the claim, and free what is not a complete checkpoint.

        Args:
            removes: Whether checkpoints are removed too.
        """
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            shutil.rmtree(self.path if removes else self.path / _SPARE, ignore_errors=True)
            os.close(descriptor)
            _claimed_folders.discard(self.path)
            _remove_abandoned(self.path.parent)


def _claim(owner: Path) -> int | None:
    """Return the descriptor of the locked file; None if the file was removed meanwhile."""
    descriptor = os.open(owner, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    # lockf, not flock, whose lock a forked worker of a data loader would hold after this process was killed.
    fcntl.lockf(descriptor, fcntl.LOCK_SH)
    if is_at(descriptor, owner):
        return descriptor
    os.close(descriptor)
    return None


def _is_claimed(folder: Path) -> bool:
    if folder in _claimed_folders:
        return True
    try:
        descriptor = os.open(folder / _OWNER, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:  # removed meanwhile
        return True
    try:
        # Asks only: two ranks that tried to lock the file would see each other.
        answer = fcntl.fcntl(descriptor, fcntl.F_GETLK, struct.pack(_LOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
    finally:
        os.close(descriptor)
    return bool(struct.unpack(_LOCK, answer)[0] != fcntl.F_UNLCK)


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of jobs that have ended without a checkpoint, such as those killed in their first save."""
    for folder in parent.iterdir():
        owner = folder / _OWNER
        with contextlib.suppress(FileNotFoundError):  # another rank has removed it
            if folder in _claimed_folders or not owner.is_file() or any(folder.glob("*.ckpt")):
                continue
            descriptor = os.open(owner, os.O_RDWR | os.O_CLOEXEC)
            try:
                # Locked, so that a job that claims the folder now waits, and then makes it anew.
                fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_at(descriptor, owner) and not any(folder.glob("*.ckpt")):
                    shutil.rmtree(folder, ignore_errors=True)
            except (BlockingIOError, PermissionError):  # a rank has claimed it, or removes it
                pass
            finally:
                os.close(descriptor)


# Files: new pages cost four times the time of a copy, and freeing them twice, so those of a superseded checkpoint serve


class RecyclingFolder(UnfinishedFolder):
    """A temporary folder beside its target that takes over the files of a superseded checkpoint.

    Args:
        target: The final path.
        moves_existing: Whether the commit moves what is at the target beside it.
    """

    def __init__(self, target: Path, *, moves_existing: bool = False) -> None:
        super().__init__(target, moves_existing=moves_existing)
        spare = target.parent / _SPARE
        for path in spare.glob("*"):
            path.rename(self.path / path.name)
        with contextlib.suppress(FileNotFoundError):
            spare.rmdir()


def recycle_folder(path: Path) -> None:
    """Remove a checkpoint, and put its large files aside for the next one; the last one of a job frees everything."""
    job = path.parent
    with contextlib.suppress(FileNotFoundError):  # another rank removes the same, or at the end everything of the job
        if not (job / _OWNER).is_file():
            remove_folder(path)
            return
        if not any(other != path for other in job.glob("*.ckpt")):
            shutil.rmtree(job, ignore_errors=True)
            return
        spare = job / _SPARE
        shutil.rmtree(spare, ignore_errors=True)
        # Before anything is removed, as a crash meanwhile must not leave a damaged checkpoint.
        path.rename(spare)
        for file in spare.iterdir():
            if file.suffix != ".safetensors":
                file.unlink(missing_ok=True)


class ReusedFile(OutputFile):
    """A file in memory, new or of a superseded checkpoint, that several threads write in buckets.

    Args:
        path: Of the file.
        size: Of the file in bytes.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._size = size
        self._cached = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._cached, size)
        self._direct = None  # memory has no direct I/O
