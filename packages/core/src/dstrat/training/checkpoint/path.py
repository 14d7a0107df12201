"""Resolution of a request for a checkpoint: a path, "last", "best" or the newest."""

from __future__ import annotations

import contextlib
import logging
import os
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from dstrat.checkpoint.formats import io_for, is_builtin, portable_io, read_step
from dstrat.checkpoint.paths import as_path, shown_path
from dstrat.checkpoint.portable.memory_files import existing_in_memory, memory_root
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.checkpoint.torch_file import read_content
from dstrat.errors import CheckpointError, MisuseError, StoreError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.checkpoint.portable.mirrored import MirroredCheckpoint
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.strategy import Strategy
    from dstrat.training.run import Run

CheckpointRequest: TypeAlias = "str | Path | Search | None"
"""The user's request for a checkpoint."""

FOLDER = "checkpoints"
"""Name of the default folder, in that of a logger or in ``default_root_dir``."""

_FOLDER_PATTERNS = ("", FOLDER, f"*/{FOLDER}", f"*/*/{FOLDER}")
"""Folders of checkpoints below ``default_root_dir``, with and without a logger."""

_log = logging.getLogger(__name__)


def remove_checkpoint(strategy: Strategy, path: str) -> None:
    """Remove a checkpoint of either built-in format, also if the run writes the other one."""
    io = io_for(path, strategy.checkpoint_io)
    if io is strategy.checkpoint_io:
        strategy.remove_checkpoint(path)
    elif strategy.is_global_zero:
        io.remove_checkpoint(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class _SearchResult:
    """The result of rank 0's search, for all ranks.

    Attributes:
        path: Of the checkpoint; None if there is none.
        error: Why there is none, if that is an error.
        name_in_memory: Its path below the root of checkpoints in memory, which machines may have at different paths.
    """

    path: str | None = None
    error: str | None = None
    name_in_memory: str | None = None


class Search(Enum):
    """Searches for a checkpoint without a path or a name."""

    NEWEST = "the complete one with the most steps; a fresh start without one"
    BEST_OF_LAST_FIT = "the one that evaluation uses if it is called without a module"


def requested_checkpoint(ckpt_path: str | Path | None, resume: str | None) -> CheckpointRequest:
    """Return the request of ``fit`` for a checkpoint to resume from.

    Raises:
        MisuseError: ``resume`` is unknown, or both arguments are set.
    """
    if resume is None:
        return ckpt_path
    if resume != "auto":
        raise MisuseError(f"resume={resume!r} is not known: pass 'auto', or give a checkpoint as ckpt_path")
    if ckpt_path is not None:
        raise MisuseError(
            f"resume={resume!r} looks for a checkpoint, and ckpt_path={str(ckpt_path)!r} is one: pass one of them"
        )
    return Search.NEWEST


def resolve_checkpoint(run: Run, requested: CheckpointRequest) -> str | Path | None:
    """Return the checkpoint to load; collective if it must be searched for.

    Args:
        run: In a run with open communication.
        requested: A path, ``"last"``, ``"best"``, a search, or None.

    Raises:
        CheckpointError: The search has no result.
    """
    if not isinstance(requested, Search) and requested not in ("last", "best"):
        return None if requested is None else os.path.expanduser(requested)  # noqa: PTH111 - it may be a URL
    in_memories = _search_machines(run)
    # Only rank 0 searches on the disk: ranks could see another newest file, and would load different checkpoints.
    result = run.strategy.broadcast(_find(run, requested, in_memories) if run.is_global_zero else _SearchResult())
    if result.error is not None:
        raise CheckpointError(result.error)
    return result.path if result.name_in_memory is None else memory_root() / result.name_in_memory


def _search_machines(run: Run) -> list[MirroredCheckpoint] | None:
    """Return the checkpoints in the memory of several machines; None if there is one machine.  Collective."""
    if run.plan.num_nodes == 1:
        return None
    io = portable_io(run.strategy.checkpoint_io)
    if io is None or not io.ranks().sends_to_ranks:
        return []
    from dstrat.checkpoint.portable.mirrored import search_memories

    folders: list[str] = []
    if run.is_global_zero:
        with contextlib.suppress(OSError):  # raised again by _find, for all ranks
            folders = [str(folder) for folder in _folders(run)]
    return search_memories(io.machines(io.ranks()), run.strategy.broadcast(folders), job_id_of(run.strategy))


def job_id_of(strategy: Strategy) -> str | None:
    """Return the name that the job of a strategy has in common with its restarts; None if there is none."""
    cluster = strategy.components.cluster_environment
    return None if cluster is None else cluster.job_id


def _find(run: Run, requested: CheckpointRequest, in_memories: list[MirroredCheckpoint] | None) -> _SearchResult:
    """Search for a checkpoint, and log the result; on rank 0 only."""
    try:
        is_best = requested is Search.BEST_OF_LAST_FIT
        result = _best_of_last_fit(run) if is_best else _search(run, requested, in_memories)
    except OSError as error:  # sent to all ranks, which would wait for the broadcast if it was raised here
        return _SearchResult(error=f"no checkpoint could be looked for: {error}")
    if result.path is not None:
        _log.warning("%s", _description(run, requested, result.path))
    return result


def _search(run: Run, requested: CheckpointRequest, in_memories: list[MirroredCheckpoint] | None) -> _SearchResult:
    if requested == "best":
        return _best(run)
    folders, io = _folders(run), run.strategy.checkpoint_io
    of_this_machine = existing_in_memory(folders, job_id_of(run.strategy)) if in_memories is None else []
    path = _newest([*folders, *of_this_machine], io)
    if in_memories:
        newest = max(in_memories, key=lambda checkpoint: (checkpoint.step, checkpoint.created_ns))
        if path is None or (newest.step, newest.created_ns) > (_step_of(path, io) or 0, written_ns(path)):
            return _SearchResult(path=str(newest.path), name_in_memory=newest.name)
    if path is not None:
        return _SearchResult(path=str(path))
    if requested == "last":
        return _SearchResult(error=f"ckpt_path='last', and {_nothing_in(folders)}")
    _log.warning("resume='auto': training starts anew, as %s", _nothing_in(folders))
    return _SearchResult()


def _description(run: Run, requested: CheckpointRequest, path: str) -> str:
    """Return the log message about the result of a search."""
    if requested is Search.NEWEST:
        return f"resume='auto': training resumes from {shown_path(path)}"
    is_best = requested in ("best", Search.BEST_OF_LAST_FIT)
    which = _describe_best(run, path) if is_best else ""
    if requested is not Search.BEST_OF_LAST_FIT:
        does = "training resumes from" if run.is_fitting else f"{run.stage} uses the weights of"
        return f"ckpt_path={requested!r}: {does} {shown_path(path)}{which}"
    return (
        f"{run.stage} without a module uses the best checkpoint of the last fit, {shown_path(path)}{which}: "
        "pass the module to use its weights as they are"
    )


def _describe_best(run: Run, path: str) -> str:
    """Return the score of a checkpoint, and its callback if there are several with a best checkpoint."""
    callback: Any = run.checkpoint_callback
    score = callback.best_model_score if getattr(callback, "best_model_path", "") == path else None
    scored = "" if score is None else f"{callback.monitor} = {float(score):.6g}"
    count = sum(hasattr(callback, "best_model_path") for callback in run.callbacks)
    of_several = "" if count == 1 else f"of the first of {count} {type(callback).__name__} callbacks"
    facts = ", ".join(filter(None, (scored, of_several)))
    return f" ({facts})" if facts else ""


def _best_of_last_fit(run: Run) -> _SearchResult:
    callback: Any = run.checkpoint_callback
    if callback is not None and callback.best_model_path:
        return _SearchResult(path=callback.best_model_path)
    if callback is None:
        why = "there is no ModelCheckpoint"
    elif run.settings.limits.fast_dev_run:
        why = f"fast_dev_run={run.settings.limits.fast_dev_run} saves none"
    elif getattr(callback, "save_top_k", None) == 0:
        why = f"{type(callback).__name__}(save_top_k=0) keeps none"
    else:
        why = "none was saved"
    return _SearchResult(
        error=f"{run.stage} without a module uses the best checkpoint of the last fit, and {why}: pass the module "
        "to use its weights as they are, or give a path as ckpt_path"
    )


def _best(run: Run) -> _SearchResult:
    """Return the best checkpoint of the last run, or of the run that saved the newest one."""
    callback: Any = run.checkpoint_callback
    if callback is None:
        return _SearchResult(
            error="ckpt_path='best', and there is no ModelCheckpoint, which would know it: give the path"
        )
    if callback.best_model_path:
        return _SearchResult(path=callback.best_model_path)
    if num_batches := run.settings.limits.fast_dev_run:
        return _SearchResult(
            error=f"ckpt_path='best', and fast_dev_run={num_batches} saves no checkpoints: leave it out, "
            "or give the path of one of another run"
        )
    folders = _folders(run)
    newest = _newest(folders, run.strategy.checkpoint_io)
    if newest is None:
        return _SearchResult(error=f"ckpt_path='best', and {_nothing_in(folders)}")
    best = _saved_state(newest, run.strategy.checkpoint_io, callback.state_key).get("best_model_path")
    if not best or not as_path(best).exists():
        names = sorted(path.name for path in newest.parent.glob("*.ckpt"))
        return _SearchResult(
            error=f"ckpt_path='best', and the newest checkpoint {str(newest)!r} names no best one that still exists: "
            f"give the path of a checkpoint{', such as ' if names else ''}{', '.join(names[:8])}"
        )
    return _SearchResult(path=best)


def _saved_state(path: CheckpointPath, checkpoint_io: CheckpointIO, state_key: str) -> dict[str, Any]:
    """Return the state of a callback in a checkpoint; of a portable one without reading tensors."""
    io = io_for(str(path), checkpoint_io)
    without_tensors = {"state_dict": None, "optimizers": None}
    saved = io.load_into(str(path), without_tensors) if io.is_collective else io.load_checkpoint(str(path))
    state: dict[str, Any] = saved.get("callbacks", {}).get(state_key, {})
    return state


def default_folder(run: Run) -> CheckpointPath:
    """Return the folder of a ModelCheckpoint without ``dirpath``."""
    root = run.settings.output.default_root_dir
    # Loggers write to a disk only: of a store the checkpoints are at its root.
    root = run.output_dir if storage_of(root).is_local else root
    return root.absolute() / FOLDER


def _folders(run: Run) -> list[CheckpointPath]:
    """Return the folders of the callbacks, also those that they had in earlier runs with the same logger.

    If none of them has a checkpoint, and the user has not chosen all of them, those below ``default_root_dir`` too.
    """
    default, log_dir = default_folder(run), run.log_dir
    dirpaths = [getattr(callback, "dirpath", None) for callback in run.checkpoint_callbacks]
    # An evaluation has not set the default one.
    current = list(dict.fromkeys(default if dirpath is None else as_path(dirpath) for dirpath in dirpaths))
    logger = next((logger for logger in run.loggers if log_dir is not None and logger.log_dir == log_dir), None)
    has_versions = logger is not None and not logger.has_fixed_version
    folders = list(current)
    if log_dir is not None and has_versions:
        for folder in current:
            folders += _in_other_runs(run, folder, Path(log_dir))
    is_fixed = bool(current) and (default not in current or (logger is not None and not has_versions))
    if is_fixed or _newest(folders, run.strategy.checkpoint_io) is not None:
        return list(dict.fromkeys(folders))
    root = run.settings.output.default_root_dir.absolute()
    below: Iterable[CheckpointPath] = chain.from_iterable(
        sorted(root.glob(pattern)) if pattern else [root] for pattern in _FOLDER_PATTERNS
    )
    return list(dict.fromkeys([*folders, *below]))


def _in_other_runs(run: Run, folder: CheckpointPath, log_dir: Path) -> list[Path]:
    """Return the folders that a folder in the logger's has in those of other runs."""
    if not isinstance(folder, Path) or not folder.absolute().is_relative_to(log_dir.absolute()):
        return []
    inner, parent = folder.absolute().relative_to(log_dir.absolute()), log_dir.absolute().parent
    paths = [other / inner for other in sorted(parent.iterdir())] if parent.is_dir() else []
    # Those in the memory of other machines are not known here.
    return [path for path in paths if run.plan.num_nodes > 1 or path.is_dir() or existing_in_memory([path])]


def _newest(folders: Iterable[CheckpointPath], io: CheckpointIO) -> CheckpointPath | None:
    """Return the complete checkpoint with the most steps, and of equal ones the latest; None if there is none."""
    paths = [path for folder in folders for path in _complete_in(folder, io)]
    if len(paths) < 2:
        return paths[0] if paths else None  # without reading its step, for which a file is opened
    steps = {path: _step_of(path, io) for path in paths}
    if None in steps.values():  # some formats have no steps without reading the full file: compare by time only
        steps = dict.fromkeys(paths, 0)
    return max(paths, key=lambda path: (steps[path], written_ns(path), str(path)))


def _step_of(path: CheckpointPath, io: CheckpointIO) -> int | None:
    if path.is_dir():
        from dstrat.checkpoint.portable.newest import step_of

        return step_of(path)
    # A file of a store would be downloaded, and one of a custom checkpoint io may be of any format.
    if not storage_of(path).is_local or not is_builtin(io):
        return None
    try:
        content = read_content(cast("Path", path), path, mmap=True)  # does not read the values of tensors
    except CheckpointError:
        return None
    return read_step(content)


def _complete_in(folder: CheckpointPath, io: CheckpointIO) -> list[CheckpointPath]:
    from dstrat.checkpoint.portable.newest import newest_checkpoint

    newest = newest_checkpoint(folder)
    portable = [] if newest is None else [newest]
    # A custom checkpoint io may write folders with any content.
    return [*portable, *(path for path in folder.glob("*.ckpt") if path.is_file() or not is_builtin(io))]


def written_ns(path: CheckpointPath) -> int:
    """Return the time when a checkpoint was written, in nanoseconds since the epoch.

    Raises:
        OSError: The checkpoint does not exist, or the store or disk fails.
    """
    if path.is_dir():
        from dstrat.checkpoint.portable.reader import read_manifest

        try:
            return read_manifest(path).created_ns  # not the folder's time, which a copy changes
        except StoreError:  # a CheckpointError too
            raise
        except CheckpointError:  # a folder of a custom checkpoint io
            pass
    return storage_of(path).modified_ns(path)


def _nothing_in(folders: list[CheckpointPath]) -> str:
    more = f" and {len(folders) - 4} more folders" if len(folders) > 4 else ""
    return f"there is no complete checkpoint in {', '.join(repr(shown_path(folder)) for folder in folders[:4])}{more}"


def check_writable(
    folder: CheckpointPath,
    io: CheckpointIO,
    advice: str = "Trainer(default_root_dir=...) or ModelCheckpoint(dirpath=...), or enable_checkpointing=False",
) -> None:
    """Check before training, without writing, that checkpoints can be written to a folder.

    Args:
        folder: May not exist yet.
        io: The checkpoint io; a custom one is not checked, as it may write elsewhere.
        advice: The arguments that choose another folder.

    Raises:
        CheckpointError: The folder is not writable.
    """
    reason = storage_of(folder).why_not_writable(folder) if is_builtin(io) else None
    if reason is not None:
        raise CheckpointError(f"checkpoints cannot be written to {str(folder)!r}, as {reason}: pass {advice}")
