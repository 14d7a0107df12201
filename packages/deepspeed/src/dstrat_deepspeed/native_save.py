"""Writing DeepSpeed's own files beside a checkpoint, for programs that use DeepSpeed without dstrat."""

from __future__ import annotations

import shutil
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.interfaces.strategy import Strategy


def native_path(path: str | Path) -> Path:
    """Return the folder of DeepSpeed's files that belong to a checkpoint; ``engine.load_checkpoint`` takes it."""
    return Path(f"{path}.deepspeed")


def save_native(
    engine: Any, checkpoint: Mapping[str, Any], path: str | Path, strategy: Strategy, *, exclude_frozen: bool
) -> None:
    """Let DeepSpeed write its files; they appear when all ranks are done; collective.

    Args:
        engine: DeepSpeed's.
        checkpoint: Says how many steps have been done.
        path: Of the checkpoint that they belong to.
        strategy: Communicates.
        exclude_frozen: Whether parameters that are not trained are left out.

    Raises:
        CheckpointError: They cannot be written, or are there already.
    """
    target = native_path(path)
    if strategy.broadcast(target.exists()):
        raise CheckpointError(f"{str(target)!r} exists already, and is not written over: choose another path")
    unfinished = target.with_name(f".{target.name}.tmp")
    if strategy.is_global_zero:
        shutil.rmtree(unfinished, ignore_errors=True)
    strategy.barrier("save_native")
    constants: Any = import_module("deepspeed.checkpoint.constants")
    engine.global_steps = checkpoint["global_step"]  # the engine counts from the start of this run
    universal = {constants.UNIVERSAL_CHECKPOINT_VERSION_KEY: constants.UNIVERSAL_CHECKPOINT_VERSION_VALUE}
    beside = {"epoch": checkpoint["epoch"], constants.UNIVERSAL_CHECKPOINT_INFO: universal}
    try:
        engine.save_checkpoint(str(unfinished), client_state=beside, exclude_frozen_parameters=exclude_frozen)
        if strategy.is_global_zero:
            unfinished.rename(target)
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"DeepSpeed's files {str(target)!r} cannot be written: {error}") from error
    strategy.barrier("save_native")


def remove_native(path: str | Path) -> None:
    """Remove the files that belong to a checkpoint, if there are any."""
    shutil.rmtree(native_path(path), ignore_errors=True)
