"""Several loaders that are read as one."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, get_args

from dstrat.data.random_state import RandomState
from dstrat.errors import MisuseError, RequestError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


Mode = Literal["min_size", "max_size_cycle", "max_size", "sequential"]

_NOTHING = object()  # None may be a batch
MAX_RESTARTS = 2  # of a loader: the latest before a checkpoint, and one after it that was read ahead


class CombinedLoader:
    """Several loaders that are iterated as one, with batches in the structure of the loaders.

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
        MisuseError: The structure contains no loader.

    Attributes:
        restarts: The latest restarts of each loader in this epoch, by its index: before which batch it was read again,
            and the random state then.  A resume needs them, as the random numbers of the training came before.
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
        self.restarts: dict[int, deque[tuple[int, RandomState]]] = {}

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
        self.restarts.clear()
        return self.read_from(0)

    def read_from(self, batches_done: int) -> Iterator[Any]:
        """Return the batches of an epoch after the first ones, which are loaded and left out.

        The caller restores the random state of the epoch's beginning before, and :attr:`restarts`.
        """
        is_sequential = self.mode == "sequential"
        iterator = itertools.chain.from_iterable(self.flattened) if is_sequential else self._together(batches_done)
        next(itertools.islice(iterator, batches_done, batches_done), None)
        return iterator

    def _together(self, batches_done: int) -> Iterator[Any]:
        readers = [
            _Reader(loader, self.restarts.setdefault(index, deque(maxlen=MAX_RESTARTS)))
            for index, loader in enumerate(self.flattened)
        ]
        counter = itertools.count()
        # The structure with numbers in place of the loaders, to put each batch where its loader was.
        indices = map_leaves(self.iterables, lambda _: next(counter))
        ends = any if self.mode == "min_size" else all
        for number in itertools.count():
            if number == 1:  # after the first batch of each loader, before which it draws its order
                for reader in readers:
                    reader.skip_to_restart(batches_done)
            values = [reader.take(number) for reader in readers]
            if ends(reader.has_ended for reader in readers):
                return
            for index, reader in enumerate(readers):
                if values[index] is _NOTHING:
                    values[index] = reader.restart(number) if self.mode == "max_size_cycle" else None
            yield map_leaves(indices, values.__getitem__)


class _Reader:
    """One of the loaders, which can be read again from its start.

    Args:
        loader: The loader.
        restarts: Its latest restarts, to which this adds.
    """

    def __init__(self, loader: Any, restarts: deque[tuple[int, RandomState]]) -> None:
        self._loader, self._restarts = loader, restarts
        self._iterator = iter(loader)
        self._next_number = 0  # of the batch before which it is read next
        self.has_ended = False

    def take(self, number: int) -> Any:
        """Return the next batch, or the marker of the end; None where the batch is already skipped."""
        if number < self._next_number:
            return None
        value = next(self._iterator, _NOTHING)
        if value is _NOTHING:
            self.has_ended = True
        return value

    def restart(self, number: int) -> Any:
        """Read the loader again, and return its first batch."""
        # has_ended stays true: once all have ended, also those that were read again, the epoch is over.
        now = RandomState.capture()
        recorded = next((random for at, random in self._restarts if at == number), None)
        if recorded is None:
            self._restarts.append((number, now))
        else:  # it was read ahead of the checkpoint, whose random state is of after it
            recorded.restore()
        self._iterator = iter(self._loader)
        value = next(self._iterator, _NOTHING)
        if value is _NOTHING:
            raise MisuseError(
                f"a {type(self._loader).__name__} in a CombinedLoader has no batch when it is read again: it is empty, "
                "or an iterator that can be read once only; give one that starts anew with each iter()"
            )
        if recorded is not None:
            now.restore()
        return value

    def skip_to_restart(self, batches_done: int) -> None:
        """Skip to a batch from the recorded restart before it, if there is one."""
        number, random = next((one for one in reversed(self._restarts) if one[0] < batches_done), (0, None))
        if random is None:
            return
        now = RandomState.capture()
        random.restore()
        self._iterator = iter(self._loader)
        next(itertools.islice(self._iterator, batches_done - number, batches_done - number), None)
        now.restore()
        self._next_number, self.has_ended = batches_done, True


# Nested structures of loaders


def is_structure(loaders: Any) -> bool:
    """Return whether the argument is a list, tuple or dict of loaders, rather than a loader."""
    return isinstance(loaders, list | tuple | Mapping)


def leaves(loaders: Any) -> Iterator[Any]:
    """Yield the loaders of a structure, in their order."""
    for _, loader in named_leaves(loaders, ""):
        yield loader


def source_leaves(loader: Any) -> list[Any]:
    """Return the loaders that a CombinedLoader or a structure reads; a list of the loader itself if it is neither."""
    return list(leaves(loader.iterables if isinstance(loader, CombinedLoader) else loader))


def map_sources(loader: Any, function: Callable[[Any], Any]) -> Any:
    """Return a loader, CombinedLoader or structure with the function applied to each loader that it reads."""
    if isinstance(loader, CombinedLoader):
        return CombinedLoader(map_leaves(loader.iterables, function), loader.mode)
    return map_leaves(loader, function)


def named_leaves(loaders: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the loaders of a structure, each with its path, such as ``name['a'][1]``."""
    if not is_structure(loaders):
        yield name, loaders
        return
    for key, child in loaders.items() if isinstance(loaders, Mapping) else enumerate(loaders):
        yield from named_leaves(child, f"{name}[{key!r}]")


def map_leaves(loaders: Any, function: Callable[[Any], Any]) -> Any:
    """Return a structure of the same shape with the function applied to each loader."""
    if isinstance(loaders, Mapping):
        return {key: map_leaves(child, function) for key, child in loaders.items()}
    if isinstance(loaders, list | tuple):
        values = [map_leaves(child, function) for child in loaders]
        if isinstance(loaders, list):
            return values
        # A named tuple takes its items one by one, and no iterable of them.
        return type(loaders)(*values) if hasattr(loaders, "_fields") else tuple(values)
    return function(loaders)


def describe(loaders: Any) -> str:
    """Return a structure as text, with the class of each loader."""
    return str(map_leaves(loaders, lambda loader: _Name(type(loader).__name__)))


class _Name(str):
    """A class name, which the text of a structure shows without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
