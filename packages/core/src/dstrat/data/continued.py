"""Reading a loader from the middle of an epoch on, as if it had been read from the start."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, Sampler
from typing_extensions import Self

from dstrat.data.agreed_end import AgreedEnd
from dstrat.data.combined_loader import CombinedLoader
from dstrat.data.division import sampler_of, with_parts
from dstrat.data.random_state import RandomState
from dstrat.data.samplers import ShuffledOrder

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
    if isinstance(loader, AgreedEnd):
        return _parts_of(loader.loader)
    if isinstance(loader, CombinedLoader):
        return [part for one in loader.flattened for part in _parts_of(one)]
    return [loader]
