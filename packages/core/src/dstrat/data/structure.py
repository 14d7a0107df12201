"""Structures of loaders: lists, tuples and dicts, one within another."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


def is_structure(given: Any) -> bool:
    """Return whether what was given holds loaders rather than being one."""
    return isinstance(given, list | tuple | Mapping)


def leaves(given: Any) -> Iterator[Any]:
    """Yield the loaders of a structure, in their order."""
    for _, loader in named_leaves(given, ""):
        yield loader


def named_leaves(given: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the loaders of a structure, each with where it is, such as ``name['a'][1]``."""
    if not is_structure(given):
        yield name, given
        return
    for key, part in given.items() if isinstance(given, Mapping) else enumerate(given):
        yield from named_leaves(part, f"{name}[{key!r}]")


def map_leaves(given: Any, function: Callable[[Any], Any]) -> Any:
    """Return a structure of the same shape with what the function makes of each loader."""
    if isinstance(given, Mapping):
        return {key: map_leaves(part, function) for key, part in given.items()}
    if isinstance(given, list | tuple):
        values = [map_leaves(part, function) for part in given]
        if isinstance(given, list):
            return values
        return type(given)(*values) if hasattr(given, "_fields") else tuple(values)
    return function(given)


def describe(given: Any) -> str:
    """Return a structure as text, with the class of each loader."""
    return str(map_leaves(given, lambda loader: _Name(type(loader).__name__)))


class _Name(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
