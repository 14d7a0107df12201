"""Reading of a training loader: epoch after epoch, or from a saved position within one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.data.resume import (
    Beginning,
    ResumedLoader,
    StatefulLoader,
    generator_states,
    is_stateful,
    restore_end_position,
    set_generator_states,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from dstrat.interfaces.strategy import Strategy


class EpochReader:
    """The position of this process in its training data, as a hand-written loop and the Trainer read it.

    Args:
        strategy: Its processes begin an epoch with the random state that they share.

    Attributes:
        beginning: The random state at the beginning of the epoch; None before the first one.
    """

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy
        self.beginning: Beginning | None = None
        self._stateful: StatefulLoader | None = None
        self._restored_position: Any = None  # of a stateful loader, until it is read

    def read(self, loader: Any, batches_done: int, *, is_read_ahead: bool, is_over: bool = False) -> Iterable[Any]:
        """Return an iterable of the remaining batches of an epoch; collective.

        Args:
            loader: This process's loader.
            batches_done: Number of batches of the epoch that have been read; 0 begins a new epoch, such as the first.
            is_read_ahead: Whether the loader may be a batch ahead of training, so that its own state is not that of the
                current batch.
            is_over: Whether the epoch's last batch is among them.
        """
        # The position is taken before the iterator of the last epoch, which knows it, is dropped.
        position = self.position(batches_done) if batches_done else None
        self._stateful = self._restored_position = None
        self._strategy.share_random_state()
        if not batches_done or self.beginning is None:  # before the loader draws the order of this epoch
            self.beginning = Beginning.of(loader)
        # Without a saved position, as after a change of the world size, the batches that are done are read again.
        if is_stateful(loader) and (position is not None or not batches_done):
            self._stateful = StatefulLoader(
                loader,
                self.beginning,
                batches_done,
                position,
                is_over=is_over and batches_done > 0,
                is_read_ahead=is_read_ahead,
            )
            return self._stateful
        return ResumedLoader(loader, self.beginning, batches_done) if batches_done else loader

    def position(self, batches_done: int) -> Any:
        """Return the position of a stateful loader after a number of batches, 0 for the end of an epoch; or None."""
        if self._stateful is None:
            return self._restored_position
        return self._stateful.position_after(batches_done) if batches_done else self._stateful.latest_position

    def record_position(self) -> None:
        """Record the position of a stateful loader before something else reads the same dataset."""
        if self._stateful is not None:
            self._stateful.record_position()

    def close(self) -> None:
        """Release the loader, which is not read any more."""
        self._stateful = None

    # State

    def state_dict(self, loader: Any, batches_done: int, *, starts_again: bool = False) -> dict[str, Any]:
        """Return the position for a checkpoint of this process.

        Args:
            loader: The loader.
            batches_done: Number of batches of the epoch that have been read; 0 between two epochs.
            starts_again: Whether a resume begins the epoch again, as the first batch of it is in progress.
        """
        beginning = self.beginning
        if starts_again and beginning is not None:
            generators, position = beginning.generators, None
        else:
            generators, position = generator_states(loader), self.position(batches_done)
        saved = None if beginning is None else beginning.state_dict()
        return {"generators": generators, "beginning": saved, "place": position}  # which are names of the format

    def load_state_dict(
        self, loader: Any, state: Mapping[str, Any], *, epoch: int, batches_done: int, is_over: bool
    ) -> None:
        """Continue at a saved position; the random state of the process is unchanged.

        Args:
            loader: The loader.
            state: The result of :meth:`state_dict`, or of :func:`reshard_position`.
            epoch: Index of the next epoch, or of the one that goes on.
            batches_done: Number of batches of it that have been read.
            is_over: Whether the position is between two epochs.
        """
        self._stateful, self._restored_position = None, state.get("place")  # absent in older checkpoints
        if self._restored_position is not None and is_over and is_stateful(loader):
            restore_end_position(loader, self._restored_position)
        set_generator_states(loader, state["generators"])
        self.beginning = None if state["beginning"] is None else Beginning.from_state_dict(state["beginning"])
        if self.beginning is not None:
            # Between epochs the saved state is of the beginning of the last one.
            self.beginning.derive_seed(loader, epoch if batches_done else epoch - 1)
            self.beginning.share_order(loader)


def reshard_position(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a saved position of rank 0 says to another number of ranks: the order of the data."""
    beginning = state["beginning"]
    if beginning is not None:  # the numbers of batches in it are those of the saved ranks
        beginning = {**beginning, "restarts": []}
    return {"generators": state["generators"], "beginning": beginning, "place": None}


def has_shared_order(state: Mapping[str, Any]) -> bool:
    """Return whether a saved position is in an order that several processes share.

    One process reads in torch's own otherwise.
    """
    beginning = state["beginning"]
    return beginning is not None and any(seed is not None for seed in Beginning.from_state_dict(beginning).seeds)
