"""Launch history of a program, which ranks that re-run it replay."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING

from dstrat.builtin.launchers.failures import text_of
from dstrat.errors import LaunchError

if TYPE_CHECKING:
    from pathlib import Path

_begun: list[int] = []
_failed: dict[int, bytes] = {}  # pickled, for an exception keeps alive whatever its traceback has seen
_started_for: list[int] = []
_FILE = "history.pickle"


def next_launch() -> int:
    """Return the number of the launch that begins now, from 0, and count on."""
    _begun.append(len(_begun))
    return _begun[-1]


def is_behind() -> bool:
    """Return whether this process re-runs a program, and has yet to reach the launch that it was started for."""
    return any(launch >= len(_begun) for launch in _started_for)


def record_failure(launch: int, error: BaseException) -> None:
    """Remember how a launch ended."""
    try:
        _failed[launch] = pickle.dumps(error)
    except Exception:  # noqa: BLE001 - an exception of the user's, of which the text has to do
        _failed[launch] = pickle.dumps(LaunchError(f"{type(error).__name__}: {text_of(error)}"))


def past_failure(launch: int) -> BaseException | None:
    """Return what a launch has raised in the process that started this rank."""
    return pickle.loads(_failed[launch]) if launch in _failed else None  # noqa: S301 - written by record_failure


def save(folder: Path) -> None:
    """Write which launch this is and what has failed before, for ranks that re-run the program up to it."""
    (folder / _FILE).write_bytes(pickle.dumps((_begun[-1], _failed)))


def load(folder: Path) -> None:
    """Take over what had failed in the process that started this rank."""
    launch, failed = pickle.loads((folder / _FILE).read_bytes())  # noqa: S301 - written by our own supervisor
    _started_for.append(launch)
    _failed.update(failed)
