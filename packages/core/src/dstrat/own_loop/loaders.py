"""The loaders of a hand-written loop: this rank's shard of the data, on its device."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dstrat.data.epoch_reader import EpochReader, has_shared_order, reshard_position
from dstrat.data.equal_length import agreed_length
from dstrat.data.loaders import (
    length_is_certain,
    length_of,
    loads_in_workers,
    prepare_evaluation_loader,
    prepare_training_loader,
    reads_ahead,
)
from dstrat.data.prefetch import move_batches, mover_for
from dstrat.data.resume import convert_position, share_seeds, shared_seeds
from dstrat.data.samplers import set_epoch

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dstrat.interfaces.strategy import Strategy


class TrainingLoader:
    """This rank's batches of a training loader, epoch after epoch.

    Each iteration reads the remaining batches of an epoch: after a ``break``, or after a resume from a checkpoint, the
    next batch follows the last one.  All ranks read as many batches as the rank with the fewest.

    Args:
        loader: The loader of the whole job.
        strategy: The strategy, whose ranks share the data and which moves batches to the device.
        distribute: Whether to shard the data between ranks; False if the loader has only this rank's shard.

    Attributes:
        epoch: Index of the epoch, from 0; it increases after the last batch of an epoch.
        batches_done: Number of batches of the epoch that have been read.
    """

    def __init__(self, loader: Any, strategy: Strategy, *, distribute: bool = True) -> None:
        self._source, self._distribute, self._keeps_order = loader, distribute, False
        self._loader = prepare_training_loader(loader, strategy, distribute=distribute)
        self._strategy = strategy
        self._limit = self._agreed_limit()
        self._reader = EpochReader(strategy)
        self.epoch = 0
        self.batches_done = 0

    def __len__(self) -> int:
        """Return the number of batches of a full epoch on this rank."""
        return len(self._loader) if self._limit is None else self._limit

    def __iter__(self) -> Iterator[Any]:
        set_epoch(self._loader, self.epoch)
        self._limit = self._agreed_limit()  # each epoch, as the length of a sampler may change
        if self._reader.beginning is None:  # as before a first epoch, or if a checkpoint lacks it
            self.batches_done = 0
        copies_ahead = self._strategy.copies_ahead
        is_read_ahead = reads_ahead(self._loader, copies_ahead=copies_ahead) or not length_is_certain(self._loader)
        loader = self._reader.read(self._loader, self.batches_done, is_read_ahead=is_read_ahead)
        remaining = itertools.count() if self._limit is None else range(self._limit - self.batches_done)
        # The loader comes first in the zip, as it may end before the limit.
        batches = (batch for batch, _ in zip(loader, remaining, strict=False))
        for batch in _on_device(batches, self._strategy, loader):
            self.batches_done += 1  # before the block: a checkpoint that it saves resumes after this batch
            yield batch
        self.epoch, self.batches_done = self.epoch + 1, 0

    def _agreed_limit(self) -> int | None:
        """Return the number of batches after which an epoch ends; None if only the loader ends it; collective."""
        length = length_of(self._loader) if length_is_certain(self._loader) else None
        return agreed_length(self._strategy, length)

    # State

    def state_dict(self) -> dict[str, Any]:
        """Return the position, which is the same on every rank."""
        return {"epoch": self.epoch, "batches_done": self.batches_done, "length": length_of(self)}

    def load_state_dict(self, state: Mapping[str, Any], *, readers: tuple[int, int] | None) -> None:
        """Continue at a saved position.

        Args:
            state: The result of :meth:`state_dict`.
            readers: Numbers of ranks, or groups of them, that read different batches, of the job that saved and of this
                one; None if the jobs have the same size.
        """
        self.epoch, self.batches_done = state["epoch"], state["batches_done"]
        length = length_of(self)
        if readers is not None and length and state["length"]:
            self.batches_done, _ = convert_position(
                self.batches_done,
                saved_length=state["length"],
                saved_readers=readers[0],
                length=length,
                readers=readers[1],
            )

    def rank_state(self) -> dict[str, Any]:
        """Return the random state and the loader's position on this rank."""
        return self._reader.state_dict(self._loader, self.batches_done)

    def load_rank_state(self, state: Mapping[str, Any], *, is_exact: bool) -> None:
        """Restore the state that :meth:`rank_state` returned.

        Args:
            state: The state of a rank that has read this rank's data, or of rank 0 of a job of another size.
            is_exact: Whether it is of the same data, so that the loader's position can be restored.
        """
        self._keep_order(has_shared_order(state))
        self._reader.load_state_dict(
            self._loader,
            state if is_exact else reshard_position(state),
            epoch=self.epoch,
            batches_done=self.batches_done,
            is_over=not self.batches_done,
        )

    def _keep_order(self, keeps_order: bool) -> None:
        """Read in the order that several ranks share, also on one rank, which has torch's own otherwise."""
        if keeps_order == self._keeps_order:
            return
        self._keeps_order = keeps_order
        self._loader = prepare_training_loader(
            self._source, self._strategy, distribute=self._distribute, keeps_order=keeps_order
        )


class EvaluationLoader:
    """This rank's batches of a loader for evaluation; in the whole job each sample is read once.

    Some strategies communicate in evaluation steps, so that all ranks must run the same number of them.  If their
    batches cannot be divided evenly, every rank reads all of them.

    Args:
        loader: The loader of the whole job.
        strategy: The strategy, whose ranks share the data and which moves batches to the device.
        distribute: Whether to shard the data between ranks; False if the loader has only this rank's shard.

    Attributes:
        is_divided: Whether each rank reads a shard of the loader; otherwise each reads all of it.
    """

    def __init__(self, loader: Any, strategy: Strategy, *, distribute: bool = True) -> None:
        # Uneven shards would let ranks wait in a step that others do not run.
        replicas = strategy.distributed_sampler_kwargs.get("num_replicas", 1)
        is_even = (length_of(loader) or 1) % replicas == 0
        distribute = distribute and (is_even or not strategy.evaluates_together)
        self._loader, self.is_divided = prepare_evaluation_loader(loader, strategy, distribute=distribute)
        self._strategy = strategy

    def __len__(self) -> int:
        """Return the number of batches on this rank."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        return _on_device(self._loader, self._strategy, self._loader)

    @property
    def seeds(self) -> list[int | None]:
        """The seeds of the shuffled orders that the ranks share, for a checkpoint."""
        return shared_seeds(self._loader)

    def share(self, seeds: list[int | None]) -> None:
        """Use the same shuffled orders as the loader whose :attr:`seeds` these are."""
        share_seeds(self._loader, seeds)


def _on_device(batches: Iterable[Any], strategy: Strategy, loader: Any) -> Iterator[Any]:
    """Return a loader's batches on the strategy's device; with streams, copies overlap with the previous step."""
    in_threads = strategy.prefetches and loads_in_workers(loader)
    ahead = reads_ahead(loader, copies_ahead=strategy.copies_ahead)
    return move_batches(batches, mover_for(strategy), strategy, in_threads=in_threads, ahead=ahead)
