"""Saving and loading in a rank of the kit's, and what is there afterwards."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.testing.fits import Fit, make_trainer, numbers
from dstrat.testing.modules import NETS
from dstrat.testing.opened import opened
from dstrat.training.callbacks.callback import Callback

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.testing.place import Place
    from dstrat.testing.subject import Subject

_MOMENT = 0.1  # seconds


def round_trip(place: Place, subject: Subject, work: Fit) -> tuple[dict[str, Any], dict[str, Any]]:
    """Train a little and save, then load into a new module; return the state at the one moment and at the other.

    Args:
        place: This rank.
        subject: The strategy.
        work: ``save_to`` relative to the job's folder.
    """
    path = place.folder / "checkpoint"
    saving, loading = _Saving(path), _Looking()
    make_trainer(place, subject, work, [saving]).fit(NETS[work.net](work, subject.configure_model))
    trainer = make_trainer(place, subject, work, [loading], max_epochs=work.epochs + 1)
    trainer.fit(NETS[work.net](work, subject.configure_model), ckpt_path=path)
    return saving.state, loading.state


def whole_state(strategy: Any) -> dict[str, Any]:
    """Return the state of a strategy's module and optimizer as plain values; of the first rank; collective."""
    module = strategy.module_state_dict()
    optimizers = [strategy.optimizer_state(optimizer) for optimizer in strategy.optimizers]
    return {"module": _plain(module), "optimizer": _plain(optimizers)}


def saves(place: Place, subject: Subject, accelerator: str) -> dict[str, Any]:
    """Save, read and remove; return whether this rank wrote, and what it found at once after each of the three.

    Args:
        place: This rank.
        subject: The strategy.
        accelerator: Where.
    """
    path = place.folder / "written"
    slow = _Slow()
    with opened(place, subject, accelerator, plugins=(slow,)) as strategy:
        strategy.save_checkpoint({"number": 5}, path)
        found = {"wrote": slow.has_written, "is there": path.exists(), "read": strategy.load_checkpoint(path)}
        strategy.barrier("all have read it")
        strategy.remove_checkpoint(path)
        strategy.barrier("it is removed")
        return {**found, "is gone": not path.exists()}


class _Slow(CheckpointIO):
    """Takes a moment to write, in which ranks that do not wait go on."""

    has_written = False

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path) -> None:
        self.has_written = True
        time.sleep(_MOMENT)
        Path(path).write_text(json.dumps(checkpoint))

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        checkpoint: dict[str, Any] = json.loads(Path(path).read_text()) if Path(path).exists() else {}
        return checkpoint

    def remove_checkpoint(self, path: str | Path) -> None:
        Path(path).unlink()


class _Saving(Callback):
    """Saves after the last batch."""

    saves_checkpoints = runs_last = True

    def __init__(self, path: Path) -> None:
        self.path = path
        self.state: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:  # noqa: ARG002 - the hook's
        if trainer.is_last_batch:
            self.state = whole_state(trainer.strategy)
            trainer.save_checkpoint(self.path)


class _Looking(Callback):
    """Looks at what was loaded, and lets training end."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:  # noqa: ARG002 - the hook's
        self.state = whole_state(trainer.strategy)
        trainer.should_stop = True


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return numbers(value)
    if isinstance(value, dict):
        return {str(key): _plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return value


def _by_number(entries: list[Any]) -> dict[str, Any]:
    return {str(number): entry for number, entry in enumerate(entries)}


def differences(one: Mapping[str, Any], other: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the places where two nested states differ."""
    found = []
    for key in dict.fromkeys([*one, *other]):
        place = f"{path}.{key}" if path else str(key)
        left, right = one.get(key), other.get(key)
        if isinstance(left, dict) and isinstance(right, dict):
            found += differences(left, right, place)
        elif isinstance(left, list) and isinstance(right, list) and left and isinstance(left[0], dict):
            found += differences(_by_number(left), _by_number(right), place)
        elif left != right:
            found.append(place)
    return found
