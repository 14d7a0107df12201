"""DeepSpeed's own files beside a checkpoint, for programs that use DeepSpeed without dstrat."""

from __future__ import annotations

import contextlib
import logging
import shutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.paths import RemotePath, as_path
from dstrat.checkpoint.portable.local_files import unused_beside
from dstrat.checkpoint.portable.ranks import GroupRanks, Ranks
from dstrat.errors import CheckpointError
from dstrat_deepspeed import internals

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.parallel.strategy import ParallelStrategy


_SUFFIX = ".deepspeed"

_log = logging.getLogger(__name__)


def native_path(path: str | Path) -> Path:
    """Return the folder of DeepSpeed's files beside a checkpoint, an argument of ``engine.load_checkpoint``."""
    return Path(f"{path}{_SUFFIX}")


def check_can_save_native(path: str | Path) -> None:
    """Raise a CheckpointError if DeepSpeed's files cannot be written beside a checkpoint."""
    if isinstance(as_path(path), RemotePath):
        raise CheckpointError(
            f"DeepSpeed's files cannot be written beside {str(path)!r}, which is in a store: leave save_native out, or "
            "save into a folder"
        )


def save_native(
    engine: Any, checkpoint: Mapping[str, Any], path: str | Path, strategy: ParallelStrategy, *, exclude_frozen: bool
) -> None:
    """Let DeepSpeed write its files beside a checkpoint; they appear when all ranks are done; collective.

    Files of an earlier checkpoint are moved to an unused name, which is logged.

    Raises:
        CheckpointError: Some rank cannot write them.
    """
    target = native_path(path)
    unfinished = target.with_name(f".{target.name}.tmp")
    constants: Any = import_module("deepspeed.checkpoint.constants")
    universal = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    engine.global_steps = checkpoint["global_step"]  # the engine counts from 0 in each run, the Trainer goes on
    tag = f"global_step{engine.global_steps}"
    with contextlib.closing(GroupRanks(strategy.timeout) if strategy.world_size > 1 else Ranks()) as ranks:
        try:
            with ranks.on_all_ranks(f"make {str(target)!r}"):
                if ranks.rank == 0:
                    shutil.rmtree(unfinished, ignore_errors=True)  # of a process that was killed
                    unfinished.mkdir(parents=True)
            with ranks.on_all_ranks(f"write DeepSpeed's files {str(target)!r}"), internals.errors_after_saving(engine):
                engine.save_checkpoint(
                    str(unfinished),
                    tag=tag,
                    client_state={"epoch": checkpoint["epoch"], constants.UNIVERSAL_CHECKPOINT_INFO: universal},
                    save_latest=False,
                    exclude_frozen_parameters=exclude_frozen,
                )
            with ranks.on_all_ranks(f"finish DeepSpeed's files {str(target)!r}"):
                if ranks.rank == 0:
                    (unfinished / "latest").write_text(tag, encoding="utf-8")
                    if target.exists():
                        moved_to = unused_beside(Path(path), _SUFFIX)
                        target.rename(moved_to)
                        _log.warning("%s has DeepSpeed's new files: those that were there are %s now", target, moved_to)
                    unfinished.rename(target)
        except CheckpointError as error:
            if ranks.rank == 0:
                shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(f"{error}; the checkpoint {str(path)!r} itself is complete") from error


def remove_native(path: str | Path) -> None:
    """Remove the files that belong to a checkpoint, if there are any."""
    shutil.rmtree(native_path(path), ignore_errors=True)
