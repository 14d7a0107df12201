"""Sending objects between a job and its ranks through files."""

from __future__ import annotations

import dataclasses
import pickle
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping
    from pathlib import Path

_DEEPEST = 8


def write_payload(path: Path, payload: object) -> None:
    """Write an object for another process of the same job.

    Tensors are copied, never shared: ranks that share parameters on the CPU would train each other's.

    Raises:
        Exception: Whatever the object's own pickling raises.
    """
    torch = sys.modules.get("torch")
    with path.open("wb") as file:
        if torch is None:
            pickle.dump(payload, file, protocol=pickle.HIGHEST_PROTOCOL)
        else:  # keeps tensors that share memory together, and writes their bytes as they are
            torch.save(payload, file, pickle_protocol=pickle.HIGHEST_PROTOCOL)


def read_payload(path: Path) -> Any:
    """Read what another process of the same job has written."""
    with path.open("rb") as file:
        if file.read(2) == b"PK":
            import torch

            file.seek(0)
            return torch.load(file, weights_only=False)
        file.seek(0)
        return pickle.load(file)  # noqa: S301 - our own process wrote it into a folder that only we can read


def unpicklable_part(parts: Mapping[str, object]) -> str:
    """Return in words the innermost thing that cannot be pickled, such as ``module.loss (function)``.

    Args:
        parts: Objects by the names that the user has for them, one of which cannot be pickled.
    """
    path, found = "", None
    names: Iterable[tuple[str, object]] = parts.items()
    for _ in range(_DEEPEST):
        culprit = next(((name, part) for name, part in names if not _can_pickle(part)), None)
        if culprit is None:
            break
        path, found = path + culprit[0], culprit[1]
        names = _parts(found)
    return f"{path} ({type(found).__name__})"


def _parts(payload: object) -> Iterator[tuple[str, object]]:
    if isinstance(payload, dict):
        yield from ((f"[{key!r}]", value) for key, value in payload.items())
    elif isinstance(payload, list | tuple | set | frozenset):
        yield from ((f"[{position}]", value) for position, value in enumerate(payload))
    elif dataclasses.is_dataclass(payload):  # which may have slots
        yield from ((f".{field.name}", getattr(payload, field.name)) for field in dataclasses.fields(payload))
    elif hasattr(payload, "__self__") and hasattr(payload, "__func__"):
        yield ".__self__", payload.__self__
    else:
        yield from ((f".{key}", value) for key, value in getattr(payload, "__dict__", {}).items())


def _can_pickle(part: object) -> bool:
    try:
        pickle.dumps(part)
    except Exception:  # noqa: BLE001 - __reduce__ and __getstate__ of any class may raise anything
        return False
    return True
