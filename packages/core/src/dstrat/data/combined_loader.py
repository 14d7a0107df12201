"""Several loaders that are read as one."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from dstrat.errors import MisuseError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]

_NOTHING = object()


class CombinedLoader:
    """Several loaders whose batches come together, in the structure in which the loaders were given.

    ``CombinedLoader({"a": one, "b": [two, three]})`` gives batches ``{"a": ..., "b": [..., ...]}``.  Several training
    loaders that are passed to the Trainer without it are read with mode ``"max_size_cycle"``, several for evaluation
    one after the other.

    Args:
        iterables: A list, tuple or dict of loaders, also one within another.
        mode: ``"min_size"`` ends with the shortest loader; ``"max_size_cycle"`` ends with the longest and starts the
            others again; ``"max_size"`` ends with the longest and gives None for those that have ended;
            ``"sequential"`` reads one loader after the other, and gives their batches alone.

    Raises:
        RequestError: The mode is unknown.
        MisuseError: There is no loader among what was given.
    """

    def __init__(self, iterables: Any, mode: Mode = "min_size") -> None:
        if mode not in get_args(Mode):
            raise RequestError(f"mode={mode!r} of CombinedLoader must be one of {', '.join(map(repr, get_args(Mode)))}")
        if not is_structure(iterables) or not list(leaves(iterables)):
            raise MisuseError(
                f"CombinedLoader({describe(iterables)}) combines no loaders: give it a list, tuple or dict of them"
            )
        self.iterables = iterables
        self.mode: Mode = mode

    @property
    def flattened(self) -> list[Any]:
        """The loaders in their order."""
        return list(leaves(self.iterables))

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            TypeError: A loader has no length.
        """
        lengths = [len(loader) for loader in self.flattened]
        if self.mode == "sequential":
            return sum(lengths)
        return min(lengths) if self.mode == "min_size" else max(lengths)

    def __iter__(self) -> Iterator[Any]:
        if self.mode == "sequential":
            return itertools.chain.from_iterable(self.flattened)
        return self._together()

    def _together(self) -> Iterator[Any]:
        readers = [_Reader(loader) for loader in self.flattened]
        indices = itertools.count()
        places = map_leaves(self.iterables, lambda _: next(indices))
        ends = any if self.mode == "min_size" else all
        missing = _Reader.take_from_the_start if self.mode == "max_size_cycle" else _none
        while True:
            values = [reader.take() for reader in readers]
            if ends(reader.has_ended for reader in readers):
                return
            for index, reader in enumerate(readers):
                if values[index] is _NOTHING:
                    values[index] = missing(reader)
            yield map_leaves(places, values.__getitem__)


class _Reader:
    """One of the loaders, which can be read again from its start."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._iterator = iter(loader)
        self.has_ended = False

    def take(self) -> Any:
        value = next(self._iterator, _NOTHING)
        if value is _NOTHING:
            self.has_ended = True
        return value

    def take_from_the_start(self) -> Any:
        self._iterator = iter(self._loader)
        value = next(self._iterator, _NOTHING)
        if value is _NOTHING:
            raise MisuseError(
                f"a {type(self._loader).__name__} in a CombinedLoader has no batch when it is read again: it is empty, "
                "or an iterator that can be read once only"
            )
        return value


def _none(reader: _Reader) -> None:  # noqa: ARG001 - it has ended
    return None


# Structures of loaders: lists, tuples and dicts, one within another.


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
