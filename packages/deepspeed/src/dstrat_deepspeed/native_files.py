"""The files of a checkpoint that DeepSpeed has written."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dstrat.errors import CheckpointError
from dstrat_deepspeed.plain_files import read_plain

_MODEL = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_?optim_states\.pt")
_POINTERS = ("latest", "latest_universal")
UNIVERSAL = "zero"
"""The folder of a universal checkpoint that has one folder for each parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NativeFiles:
    """Where the parts of a checkpoint are.

    Attributes:
        folder: The checkpoint.
        model: The module's state; of stage 3 one file for each rank.
        optimizer: The optimizer's state, one file for each rank; none of stage 0 and of universal checkpoints.
        is_universal: Whether each parameter has a folder of its own.
    """

    folder: Path
    model: list[Path]
    optimizer: list[Path] = field(default_factory=list)
    is_universal: bool = False

    def read_models(self) -> list[dict[str, Any]]:
        """Return the state of the module, as each rank has saved it."""
        return [read_plain(path) for path in self.model]

    def read_optimizers(self) -> list[dict[str, Any]]:
        """Return the state of the optimizer that each rank has saved."""
        return [read_plain(path)["optimizer_state_dict"] for path in self.optimizer]


def find_files(path: Path) -> NativeFiles | None:
    """Return the files of a checkpoint; None where there is none of DeepSpeed's.

    Args:
        path: Its folder, or the one above, which says in a file which is the latest.

    Raises:
        CheckpointError: It is of several models in parallel, or of files on NVMe, or files are missing.
    """
    folder = _pointed_to(path)
    if not folder.is_dir():
        return None
    names = sorted(child.name for child in folder.iterdir())
    models = [(int(found[1] or 0), int(found[2]), name) for name in names if (found := _MODEL.fullmatch(name))]
    states = [(int(found[1]), int(found[2]), name) for name in names if (found := _OPTIMIZER.fullmatch(name))]
    if not models:
        return None
    if any(parallel for _, parallel, _ in (*models, *states)):
        raise CheckpointError(
            f"{str(folder)!r} is of a model that is split over several ranks beside ZeRO (mp_rank_01 ...), which "
            "cannot be read: gather it with the program that has split it"
        )
    if "offloaded_tensors" in names:
        raise CheckpointError(
            f"{str(folder)!r} has weights and optimizer state as NVMe had them (offloaded_tensors), which DeepSpeed "
            "alone can read: go on from the portable checkpoint beside it, or save without offload_optimizer to 'nvme'"
        )
    numbers = [rank for rank, _, _ in states]
    if sorted(numbers) != list(range(len(numbers))):
        raise CheckpointError(f"{str(folder)!r} has the files of ranks {sorted(numbers)} only: others are missing")
    return NativeFiles(
        folder=folder,
        model=[folder / name for _, _, name in sorted(models)],
        optimizer=[folder / name for _, _, name in sorted(states)],
        is_universal=(folder / UNIVERSAL).is_dir(),
    )


def _pointed_to(path: Path) -> Path:
    for name in _POINTERS:
        pointer = path / name
        if pointer.is_file():
            tag = pointer.read_text(encoding="utf-8", errors="replace").strip()
            if (path / tag).is_dir() and Path(tag).name == tag:
                return path / tag
    return path
