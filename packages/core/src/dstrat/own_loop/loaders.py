"""The loaders of a hand-written loop: this process's part of the data, on its device."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dstrat.data.equal_length import agreed_length
from dstrat.data.loaders import (
    length_is_certain,
    length_of,
    loads_in_workers,
    prepare_evaluation_loader,
    prepare_training_loader,
)
from dstrat.data.prefetch import prefetch
from dstrat.data.resume import (
    Beginning,
    ResumedLoader,
    StatefulLoader,
    generator_states,
    is_stateful,
    restore_end_position,
    set_generator_states,
    share_seeds,
    shared_seeds,
)
from dstrat.data.samplers import set_epoch
from dstrat.interfaces.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping


class TrainingLoader:
    """This process's batches of a training loader, epoch after epoch.

    Each loop over it reads what is left of an epoch, so that one that was ended early, or that goes on from a
    checkpoint, begins with the batch after the last.  All processes read as many batches as the one with the fewest.

    Args:
        loader: The loader of the whole job.
        strategy: Says how many processes share the data, and brings batches to the device.
        distribute: Whether to divide the data; otherwise the loader has this process's part.

    Attributes:
        epoch: Index of the epoch, from 0; it grows when the last batch of one has been used.
        batches_done: Number of batches of the epoch that have been handed out.
    """

    def __init__(self, loader: Any, strategy: Strategy, *, distribute: bool = True) -> None:
        self._loader = prepare_training_loader(loader, strategy, distribute=distribute)
        self._strategy = strategy
        self._limit = self._agreed_limit()
        self._beginning: Beginning | None = None
        self._stateful: StatefulLoader | None = None
        self._position: Any = None
        self.epoch = 0
        self.batches_done = 0

    def __len__(self) -> int:
        """Return the number of batches of a whole epoch in this process."""
        return len(self._loader) if self._limit is None else self._limit

    def __iter__(self) -> Iterator[Any]:
        set_epoch(self._loader, self.epoch)
        self._limit = self._agreed_limit()  # as a sampler may have another length in each epoch
        loader = self._read_from()
        remaining = itertools.count() if self._limit is None else range(self._limit - self.batches_done)
        batches = (
            batch for batch, _ in zip(loader, remaining, strict=False)
        )  # the loader first, which may end by itself
        for batch in _on_device(batches, self._strategy, loader):
            self.batches_done += 1
            yield batch
        self.epoch, self.batches_done = self.epoch + 1, 0

    def _read_from(self) -> Any:
        """Return an iterable of the remaining batches of the epoch, or of a new one."""
        loader, position, self._stateful, self._position = self._loader, self._latest_position(), None, None
        goes_on = self.batches_done > 0 and self._beginning is not None
        if not goes_on:
            self._beginning, self.batches_done, position = Beginning.of(loader), 0, None
        assert self._beginning is not None  # noqa: S101 - as above
        if is_stateful(loader) and (position is not None or not goes_on):
            is_read_ahead = _copies_ahead(self._strategy) or not length_is_certain(loader)
            self._stateful = StatefulLoader(
                loader, self._beginning, self.batches_done, position, is_read_ahead=is_read_ahead
            )
            return self._stateful
        return ResumedLoader(loader, self._beginning, self.batches_done) if goes_on else loader

    def _latest_position(self) -> Any:
        """Return the position of a stateful loader after the latest batch; None for other loaders."""
        if self._stateful is None:
            return self._position
        return self._stateful.position_after(self.batches_done) if self.batches_done else self._stateful.latest_position

    def _agreed_limit(self) -> int | None:
        """Return after how many batches an epoch ends, None where the loader knows by itself; collective."""
        length = length_of(self._loader) if length_is_certain(self._loader) else None
        return agreed_length(self._strategy, length)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return where it is, the same in every process."""
        return {"epoch": self.epoch, "batches_done": self.batches_done, "length": length_of(self)}

    def load_state_dict(self, state: Mapping[str, Any], *, scales: bool) -> None:
        """Go on there.

        Args:
            state: What :meth:`state_dict` returned.
            scales: Whether the place is the same part of the epoch, rather than the same number of batches, as it is
                where another number of processes shared the data.
        """
        self.epoch, self.batches_done = state["epoch"], state["batches_done"]
        length = length_of(self)
        if scales and length and state["length"]:
            self.batches_done = self.batches_done * length // state["length"]

    def rank_state(self) -> dict[str, Any]:
        """Return the random state and position of this process."""
        return {
            "generators": generator_states(self._loader),
            "beginning": None if self._beginning is None else self._beginning.state_dict(),
            "place": self._latest_position(),
        }

    def load_rank_state(self, state: Mapping[str, Any], *, is_exact: bool) -> None:
        """Restore the state that :meth:`rank_state` returned.

        Args:
            state: Of this process, or of the first where their number differs.
            is_exact: Whether it is of this one, so that the loader may be at the same place.
        """
        self._stateful, self._position = None, state.get("place") if is_exact else None  # which older ones lack
        if self._position is not None and not self.batches_done and is_stateful(self._loader):
            restore_end_position(self._loader, self._position)
        set_generator_states(self._loader, state["generators"])
        if state["beginning"] is not None:
            self._beginning = Beginning.from_state_dict(state["beginning"])
            self._beginning.share_order(self._loader)


class EvaluationLoader:
    """This process's batches of a loader for evaluation; in the whole job each sample is read once.

    A strategy whose processes evaluate together must run as many steps in each: where batches cannot be divided
    evenly, every process then reads all of them.

    Args:
        loader: The loader of the whole job.
        strategy: Says how many processes share the data, and brings batches to the device.
        distribute: Whether to divide the data; otherwise the loader has this process's part.

    Attributes:
        is_divided: Whether each process reads a part of the loader; otherwise each reads all of it.
    """

    def __init__(self, loader: Any, strategy: Strategy, *, distribute: bool = True) -> None:
        replicas = strategy.distributed_sampler_kwargs.get("num_replicas", 1)
        is_even = (length_of(loader) or 1) % replicas == 0
        distribute = distribute and (is_even or not strategy.evaluates_together)
        self._loader, self.is_divided = prepare_evaluation_loader(loader, strategy, distribute=distribute)
        self._strategy = strategy

    def __len__(self) -> int:
        """Return the number of batches in this process."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _on_device(self._loader, self._strategy, self._loader)

    @property
    def seeds(self) -> list[int | None]:
        """What a shuffled order follows from where the processes share it, for a checkpoint."""
        return shared_seeds(self._loader)

    def share(self, seeds: list[int | None]) -> None:
        """Read in the order of the loader of which these are the :attr:`seeds`."""
        share_seeds(self._loader, seeds)


def _on_device(batches: Iterable[Any], strategy: Strategy, loader: Any) -> Iterator[Any]:
    """Return a loader's batches on the strategy's device; to CUDA each is copied during the step of the one before."""
    move, device = strategy.batch_to_device, strategy.root_device
    if type(strategy).prefetch is not Strategy.prefetch and loads_in_workers(loader):
        return strategy.prefetch(batches, move)
    if not _copies_ahead(strategy):
        return map(move, batches)
    return (batch for batch, _ in prefetch(((batch, False) for batch in batches), move, device))


def _copies_ahead(strategy: Strategy) -> bool:
    return strategy.root_device.type == "cuda" and type(strategy).batch_to_device is Strategy.batch_to_device
