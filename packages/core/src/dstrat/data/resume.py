"""Resume of a loader in the middle of an epoch."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, Sampler
from typing_extensions import Self

from dstrat.data.combined_loader import CombinedLoader
from dstrat.data.division import sampler_of, with_parts
from dstrat.data.equal_length import MOST_BATCHES_AHEAD, ShortestLoader
from dstrat.data.random_state import RandomState
from dstrat.data.samplers import ShuffledOrder
from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from torch import Generator


_log = logging.getLogger(__name__)


class Beginning:
    """What the order of an epoch's batches follows from: random numbers, and where samplers were when it began.

    Args:
        random: The random numbers of this process before its loader was read.
        generators: States of the loader's own generators.
        seeds: For each of the loaders that are read as one, the seed of the shuffled order that the processes share;
            None where there is none.
    """

    def __init__(self, random: RandomState, generators: list[Any], seeds: list[int | None]) -> None:
        self.random, self.generators, self.seeds = random, generators, seeds

    @classmethod
    def of(cls, loader: Any) -> Self:
        """Return that of a loader that is going to be read."""
        return cls(RandomState.capture(), generator_states(loader), shared_seeds(loader))

    def state_dict(self) -> dict[str, Any]:
        """Return it as plain values and tensors."""
        return {"random": self.random.state_dict(), "generators": self.generators, "seeds": self.seeds}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return what :meth:`state_dict` described."""
        seeds = state["seeds"] if "seeds" in state else [state["seed"]]  # older ones have that of one loader
        return cls(RandomState.from_state_dict(state["random"]), list(state["generators"]), list(seeds))

    def restore(self, loader: Any) -> None:
        """Let the loader, and this process, begin there again."""
        self.random.restore()
        set_generator_states(loader, self.generators)
        self.share_order(loader)

    def share_order(self, loader: Any) -> None:
        """Let the loader shuffle in every epoch as the one did whose epoch it was."""
        share_seeds(loader, self.seeds)


def shared_seeds(loader: Any) -> list[int | None]:
    """Return for each of the loaders that are read as one the seed of the shuffled order that the processes share.

    None where it has no such order.
    """
    return [order.seed if isinstance(order := _order_of(part), ShuffledOrder) else None for part in _parts_of(loader)]


def share_seeds(loader: Any, seeds: Iterable[int | None]) -> None:
    """Let a loader shuffle as one did of which :func:`shared_seeds` returned the seeds."""
    for part, seed in zip(_parts_of(loader), seeds, strict=False):
        if seed is not None and isinstance(order := _order_of(part), ShuffledOrder):
            order.seed = seed


def generator_states(loader: Any) -> list[Any]:
    """Return the states of the generators that belong to a loader and its sampler."""
    return [generator.get_state() for generator in _generators_of(loader)]


def set_generator_states(loader: Any, states: Iterable[Any]) -> None:
    """Take back what :func:`generator_states` returned."""
    for generator, state in zip(_generators_of(loader), states, strict=False):
        generator.set_state(state)


class ContinuedLoader:
    """The batches of a loader after those that have been read.

    A sampler is read over, so that no sample is loaded in vain; only where there is none (iterable datasets, loaders
    that are combined or of another class) batches are loaded and left out.  Random numbers that the loader draws
    when it starts are those of the epoch's beginning; all others go on from where they are.

    Args:
        loader: What is read.
        beginning: How the epoch began.
        batches_done: Number of batches that have been read.
    """

    def __init__(self, loader: Any, beginning: Beginning, batches_done: int) -> None:
        self.loader, self._beginning, self._batches_done = loader, beginning, batches_done

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return max(0, len(self.loader) - self._batches_done)

    def __iter__(self) -> Iterator[Any]:
        now = RandomState.capture()
        self._beginning.restore(self.loader)
        try:
            if _has_sampler(self.loader):
                return self._after_sampler()
            return self._after_batches()
        finally:
            now.restore()

    def _after_sampler(self) -> Iterator[Any]:
        loader: DataLoader[Any] = self.loader
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        skipping = _Skipping(getattr(loader, name), self._batches_done)
        iterator: Iterator[Any] = iter(with_parts(loader, **{name: skipping}))
        skipping.start_later()
        return iterator

    def _after_batches(self) -> Iterator[Any]:
        if self._batches_done:
            _log.info(
                "a %s cannot be read from the middle: %d batches are loaded and left out",
                type(self.loader).__name__,
                self._batches_done,
            )
        iterator: Iterator[Any] = iter(self.loader)
        next(itertools.islice(iterator, self._batches_done, self._batches_done), None)
        return iterator


class _Skipping(Sampler[Any]):
    """A sampler without its first items, drawn with the random numbers of the epoch's beginning.

    A loader with workers reads the sampler as soon as it starts, one without when the first batch is asked for.
    """

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count
        self._random: RandomState | None = None

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._count)

    def start_later(self) -> None:
        """Take note of the random numbers with which the sampler starts, if it has not been read yet."""
        self._random = RandomState.capture()

    def __iter__(self) -> Iterator[Any]:
        now = RandomState.capture()
        if self._random is not None:
            self._random.restore()
        iterator = iter(self._sampler)
        next(itertools.islice(iterator, self._count, self._count), None)
        if self._random is not None:
            now.restore()
        yield from iterator


def _has_sampler(loader: Any) -> bool:
    return isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)


def _order_of(loader: Any) -> Any:
    if not _has_sampler(loader):
        return None
    samplers = (loader.batch_sampler, sampler_of(loader))
    return next((sampler.order for sampler in samplers if hasattr(sampler, "order")), None)


def _generators_of(loader: Any) -> list[Generator]:
    """Return the generators of what a loader reads, and of the samplers, each once."""
    loaders = [part for part in _parts_of(loader) if isinstance(part, DataLoader)]
    found = [generator for one in loaders for generator in (one.generator, getattr(sampler_of(one), "generator", None))]
    return list({id(generator): generator for generator in found if generator is not None}.values())


def _parts_of(loader: Any) -> list[Any]:
    """Return the loaders that are read through a loader, itself where it is none of dstrat's."""
    if isinstance(loader, ShortestLoader):
        return _parts_of(loader.loader)
    if isinstance(loader, CombinedLoader):
        return [part for one in loader.flattened for part in _parts_of(one)]
    return [loader]


# Loaders that know their own place, by ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader.


_MOST_KEPT = 2 * MOST_BATCHES_AHEAD + 2
"""Places that are kept: batches are read before they are trained on, by at most so many."""


class StatefulLoader:
    """A loader that knows its own place.

    To ask it costs 0.05 to 0.1 ms with torchdata's, so that it is asked only for a checkpoint, unless batches are read
    before they are trained on: then the place after each of the last ones is kept.

    Args:
        loader: Of which :func:`knows_its_place` is True.
        beginning: How the epoch began.
        batches_done: Number of batches that have been read.
        place: Where the loader was then; None at the beginning.
        is_over: Whether that was the end of the epoch.
        is_read_ahead: Whether batches are read before the one before them is done with.
    """

    def __init__(
        self,
        loader: Any,
        beginning: Beginning,
        batches_done: int = 0,
        place: Any = None,
        *,
        is_over: bool = False,
        is_read_ahead: bool = True,
    ) -> None:
        self.loader, self._beginning, self._batches_done, self._place = loader, beginning, batches_done, place
        self._is_over, self._is_read_ahead = is_over, is_read_ahead
        self._kept = deque([(batches_done, place)], maxlen=_MOST_KEPT)
        self._num_read = batches_done

    def __len__(self) -> int:
        """Return the number of batches that are left."""
        return max(0, len(self.loader) - self._batches_done)

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            return iter(())
        loader = _innermost(self.loader)
        batches = self._counted(loader if self._place is None else self._from_place(loader))
        if not isinstance(self.loader, ShortestLoader):
            return batches
        agreeing = copy.copy(self.loader)
        agreeing.loader = batches
        return iter(agreeing)

    def place_after(self, batches_done: int) -> Any:
        """Return where the loader was when so many batches of the epoch had been read; None where that is forgotten."""
        if batches_done == self._num_read:
            return self.latest_place
        return next((place for number, place in self._kept if number == batches_done), None)

    @property
    def latest_place(self) -> Any:
        """Where the loader is; None before the first batch."""
        number, place = self._kept[-1]
        return place if number == self._num_read else _place_of(_innermost(self.loader))

    def keep_place(self) -> None:
        """Keep the place for a checkpoint that comes later, when something else may have read the loader."""
        self._kept.append((self._num_read, self.latest_place))

    def _from_place(self, loader: Any) -> Iterator[Any]:
        """Begin in the middle, with the random numbers of the epoch's beginning, which the loader may draw again."""
        now = RandomState.capture()
        self._beginning.restore(self.loader)
        try:
            loader.load_state_dict(copy.deepcopy(self._place))
            return iter(loader)
        finally:
            now.restore()

    def _counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        for self._num_read, batch in enumerate(batches, self._batches_done + 1):  # noqa: B020 - it counts for the others
            if self._is_read_ahead:
                self.keep_place()
            yield batch
        self._kept.append((self._num_read, _place_of(_innermost(self.loader))))  # which now is the end


def is_stateful(loader: Any) -> bool:
    """Return whether a loader says where it is."""
    return all(callable(getattr(_innermost(loader), name, None)) for name in ("state_dict", "load_state_dict"))


def rest_at(loader: Any, place: Any) -> None:
    """Let a loader be where it was at the end of an epoch, before another one is read; random numbers stay."""
    now = RandomState.capture()
    inner = _innermost(loader)
    inner.load_state_dict(copy.deepcopy(place))
    iter(inner)  # which takes the state
    now.restore()


def _place_of(loader: Any) -> Any:
    """Return where a loader is, as a copy, which later batches leave as it is."""
    try:
        return copy.deepcopy(loader.state_dict())
    except TypeError as error:
        raise MisuseError(
            f"the state_dict of the loader, a {type(loader).__name__}, cannot be copied ({error}), as it is for a "
            "checkpoint: return plain values there, or rename the method"
        ) from error


def _innermost(loader: Any) -> Any:
    return loader.loader if isinstance(loader, ShortestLoader) else loader
