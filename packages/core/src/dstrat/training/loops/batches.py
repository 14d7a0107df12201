"""Batches of a run: the training loader, iteration, and transfer to the device."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import torch

from dstrat.data.combined_loader import source_leaves
from dstrat.data.epoch_reader import EpochReader
from dstrat.data.equal_length import agreed_length
from dstrat.data.global_batch import samples_per_batch
from dstrat.data.limits import limit_of, round_to_items
from dstrat.data.loaders import (
    length_is_certain,
    length_of,
    loads_in_workers,
    prepare_training_loader,
    reads_ahead,
    sequential,
)
from dstrat.data.prefetch import move_batches, mover_for
from dstrat.errors import ConflictError, MisuseError
from dstrat.training.hooks import overrides
from dstrat.training.loops.global_batch import keep_global_batch
from dstrat.training.module.hooks import DataHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dstrat.training.run import Run


# Training data of a process: loader, limits, and batches of an epoch


_log = logging.getLogger(__name__)


class TrainingData:
    """The training loader of this process.

    Args:
        run: Has the strategy, which divides the data, and the limits.

    Attributes:
        loader: The loader; None before it is made.
        length: Number of batches of the loader, without a limit; None if it is unknown, or not made yet.
        num_batches: Number of batches in an epoch; None if the loader has no length, or is not made yet.
        samples_per_batch: Number of samples in a batch of each loader; None if it is unknown, or not made yet.
        reader: Reads its epochs, and knows the position.
        batches_per_item: Number of batches in an item of the loader: 1, or more for compiled training steps that
            consume several.
        keeps_order: Whether one process continues the shuffled order that several have begun.
    """

    def __init__(self, run: Run) -> None:
        self._run = run
        self.keeps_order = False
        self.loader: Any = None
        self.length: int | None = None
        self.num_batches: int | None = None
        self.samples_per_batch: list[int] | None = None
        self.reader = EpochReader(run.strategy)
        self.batches_per_item = 1

    def load(self) -> None:
        """Make the loader from the user's, unless it exists; collective."""
        run = self._run
        if self.loader is None:
            loader = keep_global_batch(run, run.sources.loader("train"))
            compiled = run.strategy.compiled_steps()
            self.batches_per_item = 1 if compiled is None else compiled.batches
            # Unshuffled, so that overfit_batches are the same ones in every epoch.
            self.loader = prepare_training_loader(
                sequential(loader) if run.settings.data.overfit_batches else loader,
                run.strategy,
                distribute=run.settings.data.use_distributed_sampler,
                keeps_order=self.keeps_order,
            )
            items = length_of(self.loader)
            self.length = None if items is None else items * self.batches_per_item
            self.samples_per_batch = samples_per_batch(self.loader, is_alone=run.world_size == 1)
            # The limit is of each rank's batches, so it is applied after the division.
            limit = limit_of(run.settings.data.limit_train_batches, self.length, "limit_train_batches")
            self.num_batches = self._round_to_items(limit)

    def _round_to_items(self, count: int | None) -> int | None:
        """Round a number of batches to complete items, and log a warning if that changes it."""
        rounded = round_to_items(count, self.batches_per_item)
        if rounded != count:
            _log.warning(
                "an epoch has %d training batches rather than %d, as one call of the compiled step takes %d",
                rounded,
                count,
                self.batches_per_item,
            )
        return rounded

    def open(self) -> None:
        """Make the loader, and agree with the other ranks on its length; collective."""
        self.load()
        self.num_batches = agreed_length(self._run.strategy, self.num_batches)

    def close(self) -> None:
        """Release the loader, which is not read any more."""
        self.loader = None
        self.reader.close()

    def reload_when_due(self, epoch: int) -> bool:
        """Make a new loader if ``reload_dataloaders_every_n_epochs`` says so, and return whether it did; collective."""
        # From the first epoch on, not from that of a resume, which is to make its loaders when the whole run does.
        every = self._run.settings.data.reload_dataloaders_every_n_epochs
        if not every or not epoch or epoch % every:
            return False
        self.loader = None
        self.open()
        # Lightning makes an iterator of each new loader, and drops it: one more seed, and then the same numbers.
        for loader in source_leaves(self.loader):
            torch.empty((), dtype=torch.int64).random_(generator=getattr(loader, "generator", None))
        return True

    def check_position(self, batches_done: int) -> None:
        """Check that an epoch can be resumed after a number of batches.

        Raises:
            ConflictError: The number is not a multiple of the batches in a call of the compiled step.
        """
        is_over = self.num_batches is not None and batches_done >= self.num_batches
        if batches_done % self.batches_per_item and not is_over:
            raise ConflictError(
                f"the checkpoint was saved after {batches_done} batches of an epoch, and one call of the compiled step "
                f"takes {self.batches_per_item}: resume from one that was saved at the end of an epoch, or after a "
                f"multiple of {self.batches_per_item} batches"
            )

    def batches(self, *, done: int, is_over: bool = False) -> Iterable[tuple[Any, bool]]:
        """Return the remaining items of an epoch on the device, each with whether it is the last.

        Args:
            done: Number of batches of the epoch that have been trained on.
            is_over: Whether the epoch's last batch is among them.
        """
        run, num_remaining = self._run, self.num_batches
        done //= self.batches_per_item
        if num_remaining is not None:
            num_remaining = max(0, num_remaining // self.batches_per_item - done)
        ahead = reads_ahead(self.loader, copies_ahead=can_copy_ahead(run))
        is_read_ahead = ahead or num_remaining is None or not length_is_certain(self.loader)
        loader = self.reader.read(self.loader, done, is_read_ahead=is_read_ahead, is_over=is_over)
        move = run.profiled("transfer_batch", batch_mover(run, 0))
        # A resume after the last batch of an epoch has no batch left, which is no error.
        batches = run.profiled_batches(Batches(loader, num_remaining, None if done else "training"))
        return move_batches(
            batches,
            lambda pair: (move(pair[0]), pair[1]),
            run.strategy,
            in_threads=can_prefetch(run, loader),
            ahead=ahead,
        )


_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Batches:
    """The batches of a loader up to a limit, each with whether it is the last.

    A loader of known length is read one batch at a time, so that it draws random numbers in the order of a hand-written
    loop.  One of unknown length is read one batch ahead, to know the last one.

    Args:
        loader: Any iterable of batches.
        count: Maximal number of batches; None for all of a loader of unknown length.
        required_for: Purpose that needs at least one batch, such as ``"training"``; None needs none.
    """

    def __init__(self, loader: Any, count: int | None, required_for: str | None = None) -> None:
        self._loader = loader
        self._count = count
        self._required_for = required_for

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        if self._count is None or not length_is_certain(self._loader):
            return self._ahead()
        return self._counted(self._count)

    def _counted(self, count: int) -> Iterator[tuple[Any, bool]]:
        if count == 0:
            return
        last = count - 1
        for index, batch in enumerate(self._loader):
            yield batch, index == last
            if index >= last:  # without a look at the next batch, which would draw random numbers
                return

    def _ahead(self) -> Iterator[tuple[Any, bool]]:
        iterator = itertools.islice(self._loader, self._count)
        nothing = object()
        current = next(iterator, nothing)
        if current is nothing and self._required_for is not None and self._count != 0:
            raise MisuseError(
                f"the {self._required_for} loader (a {type(self._loader).__name__}) gave no batch: it is empty, "
                "or an iterator that can be read once only; pass something that starts anew with each iter()"
            )
        while current is not nothing:
            following = next(iterator, nothing)
            yield current, following is nothing
            current = following


def can_copy_ahead(run: Run) -> bool:
    """Return whether batches can be copied to the device during the previous step."""
    # Not with a user's transfer code, which may rely on the order of calls or on the stream.
    return run.strategy.copies_ahead and not any(_hook_owners(run))


def can_prefetch(run: Run, loader: Any) -> bool:
    """Return whether the strategy prefetches a loader's batches in threads."""
    # Not with transfer hooks, which are not called in threads, and not with a profiler, which measures one thread.
    does = run.strategy.prefetches and loads_in_workers(loader)
    return does and run.profiler is None and not any(_hook_owners(run))


def batch_mover(run: Run, dataloader_idx: int) -> Callable[[Any], Any]:
    """Return the function that moves the batches of a loader to the device.

    It calls the transfer hooks that the module or the data module overrides.
    """
    strategy = run.strategy
    before, transfer, after = owners = _hook_owners(run)
    if not any(owners):
        return mover_for(strategy)

    def move(batch: Any) -> Any:
        if before is not None:
            batch = before.on_before_batch_transfer(batch, dataloader_idx)
        if transfer is None:
            batch = strategy.batch_to_device(batch)
        else:
            batch = transfer.transfer_batch_to_device(batch, strategy.root_device, dataloader_idx)
            batch = strategy.precision_plugin.convert_input(batch)
        return batch if after is None else after.on_after_batch_transfer(batch, dataloader_idx)

    return move


def _hook_owners(run: Run) -> list[DataHooks | None]:
    """Return, for each transfer hook, the data module or module that overrides it; None if neither does."""
    owners: list[DataHooks | None] = [run.datamodule, run.module]
    return [
        next((owner for owner in owners if owner is not None and overrides(owner, name, DataHooks)), None)
        for name in _TRANSFER_HOOKS
    ]
