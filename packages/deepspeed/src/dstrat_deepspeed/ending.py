"""Ending DeepSpeed without waiting for anybody."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from collections.abc import Iterator


def release_groups(engine: Any) -> None:
    """Take the process groups out of an engine that has been destroyed, and out of what DeepSpeed has made for it.

    A group closes, and the other ranks notice that this one has failed, only when nothing holds it; a traceback keeps
    the engine alive.
    """
    for part in _parts(engine):
        for name, value in list(vars(part).items()):
            if _has_group(value):
                vars(part)[name] = None


def _parts(engine: Any) -> Iterator[Any]:
    waiting, seen = [engine], {id(engine)}
    while waiting:
        part = waiting.pop()
        yield part
        for value in vars(part).values():
            if type(value).__module__.startswith("deepspeed.") and hasattr(value, "__dict__") and id(value) not in seen:
                seen.add(id(value))
                waiting.append(value)


def _has_group(value: Any) -> bool:
    if isinstance(value, dict):
        value = list(value.values())
    return isinstance(value, ProcessGroup) or (
        isinstance(value, (list, tuple)) and any(isinstance(each, ProcessGroup) for each in value)
    )
