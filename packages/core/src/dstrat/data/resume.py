"""Resuming of a loader in the middle of an epoch."""

from __future__ import annotations

import copy
import itertools
import logging
from collections import deque
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import torch
from torch import Generator
from torch.utils.data import DataLoader, IterableDataset, Sampler, TensorDataset
from typing_extensions import Self

from dstrat.data.combined_loader import MAX_RESTARTS, CombinedLoader
from dstrat.data.division import sampler_of, with_attributes
from dstrat.data.equal_length import MOST_BATCHES_AHEAD, ShortestLoader
from dstrat.data.random_state import RandomState
from dstrat.data.samplers import ShuffledOrder, generators_of
from dstrat.errors import MisuseError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence


_log = logging.getLogger(__name__)


def convert_position(
    batches_done: int,
    *,
    saved_length: int,
    saved_readers: int,
    length: int,
    readers: int,
    saved_samples: Sequence[int] | None = None,
    samples: Sequence[int] | None = None,
) -> tuple[int, Fraction]:
    """Convert the number of batches that each rank has done in an epoch to that of another number of readers.

    Ranks that share each batch are one reader.

    Args:
        batches_done: The number.
        saved_length: Number of batches of each of those ranks in an epoch.
        saved_readers: Number of readers that these ranks were; of the ranks, if it is unknown.
        length: Number of batches of each rank now.
        readers: Number of readers now; of ranks, if the saved one is unknown.
        saved_samples: Number of samples in a batch of each of the loaders of such a rank; None if it is unknown.
        samples: The same now.

    Returns:
        The number of batches with the same samples, rounded down, so that no sample is left out, and the number of
        batches of a rank that have as many samples as one of those.
    """
    ratio = Fraction(saved_readers, readers)
    if saved_samples and samples:
        ratios = {Fraction(before, now) for before, now in zip(saved_samples, samples, strict=False)}
        if len(ratios) == 1 and len(saved_samples) == len(samples):
            ratio *= ratios.pop()
    # Lengths are rounded up, or down with drop_last, so that their ratio is not exact.  It counts where the numbers of
    # readers and samples do not explain it: that of readers is unknown in older checkpoints, or no rank has a share.
    is_rounded_up = (saved_length - 1) * ratio < length < saved_length * ratio + 1
    is_rounded_down = saved_length * ratio - 1 < length < (saved_length + 1) * ratio
    if not (is_rounded_up or is_rounded_down):
        ratio = Fraction(length, saved_length)
    is_over = batches_done >= saved_length  # whose last batches may be incomplete
    return length if is_over else min(int(batches_done * ratio), length), ratio


class Beginning:
    """The random state at the beginning of an epoch, which determines the order of its batches.

    Args:
        random: The random numbers of this process before its loader was read.
        generators: States of the loader's own generators.
        seeds: For each of the loaders that are read as one, the seed of the shuffled order that the processes share;
            None where there is none.
        restarts: Restarts of loaders that ended within the epoch, of a :class:`CombinedLoader`, which adds to them.
    """

    def __init__(
        self,
        random: RandomState,
        generators: list[Any],
        seeds: list[int | None],
        restarts: dict[int, deque[tuple[int, RandomState]]],
    ) -> None:
        self.random, self.generators, self.seeds, self.restarts = random, generators, seeds, restarts

    @classmethod
    def of(cls, loader: Any) -> Self:
        """Capture the state of a loader before its epoch is read."""
        restarts = loader.restarts if isinstance(loader, CombinedLoader) else {}
        return cls(RandomState.capture(), generator_states(loader), shared_seeds(loader), restarts)

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain values and tensors."""
        restarts = [
            {"loader": index, "number": number, "random": random.state_dict()}
            for index, latest in self.restarts.items()
            for number, random in latest
        ]
        return {
            "random": self.random.state_dict(),
            "generators": self.generators,
            "seeds": self.seeds,
            "restarts": restarts,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """Return the object that :meth:`state_dict` saved."""
        seeds = state["seeds"] if "seeds" in state else [state["seed"]]  # older ones have that of one loader
        restarts: dict[int, deque[tuple[int, RandomState]]] = {}
        for saved in state.get("restarts", ()):  # absent in older checkpoints
            latest = restarts.setdefault(saved["loader"], deque(maxlen=MAX_RESTARTS))
            latest.append((saved["number"], RandomState.from_state_dict(saved["random"])))
        return cls(RandomState.from_state_dict(state["random"]), list(state["generators"]), list(seeds), restarts)

    def restore(self, loader: Any) -> None:
        """Restore the random state of this process and of the loader."""
        if isinstance(loader, CombinedLoader):
            loader.restarts = self.restarts
        self.random.restore()
        set_generator_states(loader, self.generators)
        self.share_order(loader)

    def share_order(self, loader: Any) -> None:
        """Set the shuffle seeds of the loader to the saved ones."""
        share_seeds(loader, self.seeds)

    def derive_seed(self, loader: Any, epoch: int) -> None:
        """Derive the shuffle seed that several processes share from the order that one process has drawn.

        Only that of a single loader of torch: several loaders draw their orders one after the other.

        Args:
            loader: The loader of this process.
            epoch: Index of the epoch that began in this state.
        """
        order = _order_of(_innermost(loader))
        if self.seeds == [None] and isinstance(order, ShuffledOrder) and not is_stateful(loader):
            now = RandomState.capture()
            self.random.restore()
            self.seeds = [order.seed_for(_draw_sampler_seed(_innermost(loader)), epoch)]
            now.restore()


def _draw_sampler_seed(loader: DataLoader[Any]) -> int:
    """Draw the seed by which torch's ``RandomSampler`` shuffles an epoch of a loader."""
    # A loader draws the seed of its workers first, by a generator of its own if it has one.
    iter(DataLoader(TensorDataset(torch.zeros(1)), generator=None if loader.generator is None else Generator()))
    return int(torch.empty((), dtype=torch.int64).random_().item())  # as RandomSampler.__iter__ does


def shared_seeds(loader: Any) -> list[int | None]:
    """Return the shared shuffle seed of each source loader, None for one without."""
    return [
        order.seed if isinstance(order := _order_of(source), ShuffledOrder) else None
        for source in _source_loaders(loader)
    ]


def share_seeds(loader: Any, seeds: Iterable[int | None]) -> None:
    """Set the shuffle seeds that :func:`shared_seeds` returned."""
    for source, seed in zip(_source_loaders(loader), seeds, strict=False):
        if seed is not None and isinstance(order := _order_of(source), ShuffledOrder):
            order.seed = seed


def generator_states(loader: Any) -> list[Any]:
    """Return the states of the generators that belong to a loader and its sampler."""
    return [generator.get_state() for generator in _generators_of(loader)]


def set_generator_states(loader: Any, states: Iterable[Any]) -> None:
    """Restore the states that :func:`generator_states` returned."""
    for generator, state in zip(_generators_of(loader), states, strict=False):
        generator.set_state(state)


class ResumedLoader:
    """The remaining batches of an epoch.

    A sampler is advanced without loading samples.  Loaders without one (iterable datasets, combined loaders, loaders of
    another class) load the batches and discard them.  The loader starts with the random state of the epoch's beginning;
    the random state of the process is otherwise unchanged.

    Args:
        loader: The loader of the epoch.
        beginning: How the epoch began.
        batches_done: Number of batches that have been read.
    """

    def __init__(self, loader: Any, beginning: Beginning, batches_done: int) -> None:
        self.loader, self._beginning, self._batches_done = loader, beginning, batches_done

    def __len__(self) -> int:
        """Return the number of remaining batches."""
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
        iterator: Iterator[Any] = iter(with_attributes(loader, **{name: skipping}))
        # After iter, in which a loader draws the seed of its workers, and before the caller restores the random state.
        skipping.start_later()
        return iterator

    def _after_batches(self) -> Iterator[Any]:
        if self._batches_done:
            _log.info(
                "a %s cannot be read from the middle: %d batches are loaded and left out",
                type(self.loader).__name__,
                self._batches_done,
            )
        if isinstance(self.loader, CombinedLoader):
            return self.loader.read_from(self._batches_done)
        iterator: Iterator[Any] = iter(self.loader)
        next(itertools.islice(iterator, self._batches_done, self._batches_done), None)
        return iterator


class _Skipping(Sampler[Any]):
    """A sampler without its first items, drawn with the random state of the epoch's beginning.

    A loader with workers reads the sampler when it starts; one without workers, when it yields the first batch.
    """

    def __init__(self, sampler: Any, count: int) -> None:
        self._sampler, self._count = sampler, count
        self._random: RandomState | None = None

    def __len__(self) -> int:
        return max(0, len(self._sampler) - self._count)

    def start_later(self) -> None:
        """Capture the random state with which the sampler starts, if it has not been read yet."""
        self._random = RandomState.capture()

    def __iter__(self) -> Iterator[Any]:
        now = RandomState.capture()
        if self._random is not None:  # otherwise the loader reads in its own iter, when the state is that already
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
    """Return the distinct generators of the source loaders and of their samplers."""
    loaders = [source for source in _source_loaders(loader) if isinstance(source, DataLoader)]
    generators = [
        generator
        for one in loaders
        for generator in (one.generator, *generators_of(sampler_of(one)), *generators_of(one.batch_sampler))
    ]
    return list({id(generator): generator for generator in generators if generator is not None}.values())


def _source_loaders(loader: Any) -> list[Any]:
    """Return the user's loaders inside dstrat's wrappers."""
    if isinstance(loader, ShortestLoader):
        return _source_loaders(loader.loader)
    if isinstance(loader, CombinedLoader):
        return [source for one in loader.flattened for source in _source_loaders(one)]
    return [loader]


# Stateful loaders: those with ``state_dict`` and ``load_state_dict``, as torchdata's StatefulDataLoader


_MAX_POSITIONS = 2 * MOST_BATCHES_AHEAD + 2
"""Number of recorded positions; batches are read ahead by fewer than this."""


class StatefulLoader:
    """A loader that resumes by its own state dict, here called its position.

    torchdata's ``state_dict`` takes 0.05 to 0.1 ms, so it is called for checkpoints only.  Where batches are read ahead
    of training, it is called for each batch, and the latest positions are recorded.

    Args:
        loader: A loader for which :func:`is_stateful` is True.
        beginning: How the epoch began.
        batches_done: Number of batches that have been read.
        position: State of the loader after them; None at the beginning.
        is_over: Whether the epoch has ended.
        is_read_ahead: Whether a batch may be read before the step of the previous one has ended.
    """

    def __init__(
        self,
        loader: Any,
        beginning: Beginning,
        batches_done: int = 0,
        position: Any = None,
        *,
        is_over: bool = False,
        is_read_ahead: bool = True,
    ) -> None:
        self.loader, self._beginning, self._batches_done, self._position = loader, beginning, batches_done, position
        self._is_over, self._is_read_ahead = is_over, is_read_ahead
        self._positions = deque([(batches_done, position)], maxlen=_MAX_POSITIONS)
        self._num_read = batches_done

    def __len__(self) -> int:
        """Return the number of remaining batches."""
        return max(0, len(self.loader) - self._batches_done)

    def __iter__(self) -> Iterator[Any]:
        if self._is_over:
            return iter(())
        loader = _innermost(self.loader)
        batches = self._counted(loader if self._position is None else self._resume(loader))
        if not isinstance(self.loader, ShortestLoader):
            return batches
        # Positions are recorded below the agreement, which reads ahead; position_after finds that of a trained batch.
        agreeing = copy.copy(self.loader)
        agreeing.loader = batches
        return iter(agreeing)

    def position_after(self, batches_done: int) -> Any:
        """Return the position after a number of batches of the epoch; None where it is no longer recorded.

        After all of them, it is the one before the end, from which a loader of torchdata begins another epoch.
        """
        position = next((position for number, position in self._positions if number == batches_done), None)
        return self.latest_position if position is None and batches_done == self._num_read else position

    @property
    def latest_position(self) -> Any:
        """The current position; None before the first batch."""
        number, position = self._positions[-1]
        return position if number == self._num_read else _copy_position(_innermost(self.loader))

    def record_position(self) -> None:
        """Record the current position for a later checkpoint, before something else reads the loader."""
        self._positions.append((self._num_read, self.latest_position))

    def _resume(self, loader: Any) -> Iterator[Any]:
        """Return an iterator from the saved position."""
        # The loader may draw the random numbers of its start again.
        now = RandomState.capture()
        self._beginning.restore(self.loader)
        try:
            loader.load_state_dict(copy.deepcopy(self._position))  # which the loader may keep and change
            return iter(loader)
        finally:
            now.restore()

    def _counted(self, batches: Iterable[Any]) -> Iterator[Any]:
        for self._num_read, batch in enumerate(batches, self._batches_done + 1):  # noqa: B020 - it counts for the others
            if self._is_read_ahead:
                self.record_position()
            yield batch
        # Once more: the position after the last batch is not yet that of the end.
        self._positions.append((self._num_read, _copy_position(_innermost(self.loader))))


def is_stateful(loader: Any) -> bool:
    """Return whether a loader has ``state_dict`` and ``load_state_dict``."""
    return all(callable(getattr(_innermost(loader), name, None)) for name in ("state_dict", "load_state_dict"))


def restore_end_position(loader: Any, position: Any) -> None:
    """Restore the position of a loader at the end of an epoch; the random state of the process is unchanged."""
    now = RandomState.capture()
    inner = _innermost(loader)
    inner.load_state_dict(copy.deepcopy(position))
    iter(inner)  # StatefulDataLoader applies the loaded state in __iter__
    now.restore()


def _copy_position(loader: Any) -> Any:
    """Return a copy of a loader's state, which later batches do not change."""
    try:
        return copy.deepcopy(loader.state_dict())
    except TypeError as error:
        raise MisuseError(
            f"the state_dict of the loader, a {type(loader).__name__}, cannot be copied ({error}), as it is for a "
            "checkpoint: return plain values there, or rename the method"
        ) from error


def _innermost(loader: Any) -> Any:
    return loader.loader if isinstance(loader, ShortestLoader) else loader
