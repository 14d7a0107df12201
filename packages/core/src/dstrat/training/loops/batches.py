"""Batches of a run: the training loader, iteration, and transfer to the device."""

from __future__ import annotations

import itertools
import logging
from typing import TYPE_CHECKING, Any

import torch

from dstrat.data.combined_loader import CombinedLoader
from dstrat.data.equal_length import agreed_length
from dstrat.data.global_batch import samples_per_batch
from dstrat.data.limits import limit_of, round_to_items
from dstrat.data.loaders import length_is_certain, length_of, loads_in_workers, prepare_training_loader, sequential
from dstrat.data.prefetch import prefetch
from dstrat.data.resume import Beginning, ResumedLoader, StatefulLoader, is_stateful
from dstrat.errors import ConflictError, MisuseError
from dstrat.interfaces.batch import mover_to
from dstrat.interfaces.strategy import Strategy
from dstrat.training.elastic import keep_global_batch
from dstrat.training.hooks import overrides
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
        beginning: The random state at the beginning of the epoch; None before the first one.
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
        self.beginning: Beginning | None = None
        self.batches_per_item = 1
        self._stateful: StatefulLoader | None = None

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
        self.loader = self._stateful = None

    def reload_when_due(self, epoch: int) -> bool:
        """Make a new loader if ``reload_dataloaders_every_n_epochs`` says so, and return whether it did; collective."""
        # From the first epoch on, not from that of a resume, which is to make its loaders when the whole run does.
        every = self._run.settings.data.reload_dataloaders_every_n_epochs
        if not every or not epoch or epoch % every:
            return False
        self.loader = None
        self.open()
        # Lightning makes an iterator of each new loader, and drops it: one more seed, and then the same numbers.
        for loader in self.loader.flattened if isinstance(self.loader, CombinedLoader) else [self.loader]:
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

    def position(self, batches_done: int | None) -> Any:
        """Return the position of a stateful loader after a number of batches; None for other loaders.

        Args:
            batches_done: The number; None for the end of the epoch.
        """
        if self._stateful is None:
            return None
        if batches_done is None:
            return self._stateful.latest_position
        return self._stateful.position_after(batches_done // self.batches_per_item)

    def batches(
        self, *, done: int, beginning: Beginning | None, position: Any = None, is_over: bool = False
    ) -> Iterable[tuple[Any, bool]]:
        """Return the remaining items of an epoch on the device, each with whether it is the last.

        Args:
            done: Number of batches of the epoch that have been trained on.
            beginning: The random state at the beginning of the epoch, if it is resumed.
            position: Position of a stateful loader after these batches.
            is_over: Whether the epoch's last batch is among them.
        """
        run, num_remaining = self._run, self.num_batches
        run.strategy.share_random_state()
        done //= self.batches_per_item
        num_remaining = None if num_remaining is None else num_remaining // self.batches_per_item
        if done and beginning is not None:
            self.beginning = beginning
            num_remaining = None if num_remaining is None else max(0, num_remaining - done)
        else:  # before the loader draws the order of this epoch
            self.beginning, done, position = Beginning.of(self.loader), 0, None
        copies_ahead_to = device_to_copy_ahead_to(run)
        # Whether the loader is a batch ahead of training, so that its own state is not that of the current batch.
        is_read_ahead = copies_ahead_to is not None or num_remaining is None or not length_is_certain(self.loader)
        loader = self._read_from(self.beginning, done, position, is_over=is_over, is_read_ahead=is_read_ahead)
        move = run.profiled("transfer_batch", batch_mover(run))
        # A resume after the last batch of an epoch has no batch left, which is no error.
        batches = run.profiled_batches(Batches(loader, num_remaining, None if done else "training"))
        prefetching = prefetching_strategy(run, loader)
        return device_batches(batches, move, copies_ahead_to=copies_ahead_to, prefetching=prefetching)

    def record_position(self) -> None:
        """Record the position of a stateful loader before a validation, which may read the same dataset."""
        if self._stateful is not None:
            self._stateful.record_position()

    def _read_from(self, beginning: Beginning, done: int, position: Any, *, is_over: bool, is_read_ahead: bool) -> Any:
        """Return an iterable of the remaining batches of an epoch."""
        # Without a saved position, as after a change of the world size, the batches that are done are read again.
        self._stateful = None
        if is_stateful(self.loader) and (position is not None or not done):
            self._stateful = StatefulLoader(
                self.loader, beginning, done, position, is_over=is_over and done > 0, is_read_ahead=is_read_ahead
            )
            return self._stateful
        return ResumedLoader(self.loader, beginning, done) if done else self.loader


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


def device_batches(
    batches: Iterable[tuple[Any, bool]],
    move: Callable[[Any, int], Any],
    *,
    dataloader_idx: int = 0,
    copies_ahead_to: torch.device | None = None,
    prefetching: Strategy | None = None,
) -> Iterator[tuple[Any, bool]]:
    """Yield batches on the device, each with whether it is the last.

    Args:
        batches: Pairs of :class:`Batches`.
        move: The result of :func:`batch_mover`: moves a batch (with the index of its loader) to the device.
        dataloader_idx: Index of the loader.
        copies_ahead_to: The result of :func:`device_to_copy_ahead_to`: the CUDA device to which the next batch is
            copied during a step; None copies each batch before its step.
        prefetching: The result of :func:`prefetching_strategy`: the strategy that prefetches batches in threads.
    """
    if prefetching is not None:
        yield from prefetching.prefetch(batches, lambda pair: (move(pair[0], dataloader_idx), pair[1]))
        return
    if copies_ahead_to is not None:
        yield from prefetch(batches, lambda batch: move(batch, dataloader_idx), copies_ahead_to)
        return
    for batch, is_last in batches:
        yield move(batch, dataloader_idx), is_last


def device_to_copy_ahead_to(run: Run) -> torch.device | None:
    """Return the device to which batches can be copied during the previous step; None if they cannot."""
    # Only with streams, and without a user's transfer code, which may rely on the order of calls or on the stream.
    strategy = run.strategy
    is_ours = not any(_hook_owners(run)) and not overrides(strategy, "batch_to_device", Strategy)
    return strategy.root_device if is_ours and strategy.accelerator.has_streams else None


def prefetching_strategy(run: Run, loader: Any) -> Strategy | None:
    """Return the strategy if it prefetches a loader's batches in threads; otherwise None."""
    # Not with transfer hooks, which are not called in threads, and not with a profiler, which measures one thread.
    strategy = run.strategy
    does = overrides(strategy, "prefetch", Strategy) and loads_in_workers(loader)
    return strategy if does and run.profiler is None and not any(_hook_owners(run)) else None


def batch_mover(run: Run) -> Callable[[Any, int], Any]:
    """Return the function that moves a batch (with the index of its loader) to the device.

    It calls the transfer hooks that the module or the data module overrides.
    """
    strategy = run.strategy
    before, transfer, after = owners = _hook_owners(run)
    if not any(owners):
        return _leanest_mover(strategy)

    def move(batch: Any, dataloader_idx: int) -> Any:
        if before is not None:
            batch = before.on_before_batch_transfer(batch, dataloader_idx)
        if transfer is None:
            batch = strategy.batch_to_device(batch)
        else:
            batch = transfer.transfer_batch_to_device(batch, strategy.root_device, dataloader_idx)
            batch = strategy.precision_plugin.convert_input(batch)
        return batch if after is None else after.on_after_batch_transfer(batch, dataloader_idx)

    return move


def _leanest_mover(strategy: Strategy) -> Callable[[Any, int], Any]:
    """Return an equivalent of the strategy's method, with its look-ups done once instead of per batch."""
    if overrides(strategy, "batch_to_device", Strategy):
        to_device = strategy.batch_to_device
        return lambda batch, dataloader_idx: to_device(batch)  # noqa: ARG005 - no hook asks for it
    move = mover_to(strategy.root_device, non_blocking=strategy.accelerator.has_streams)
    convert = strategy.precision_plugin.convert_input
    return lambda batch, dataloader_idx: convert(move(batch))  # noqa: ARG005 - likewise


def _hook_owners(run: Run) -> list[DataHooks | None]:
    """Return, for each transfer hook, the data module or module that overrides it; None if neither does."""
    owners: list[DataHooks | None] = [run.datamodule, run.module]
    return [
        next((owner for owner in owners if owner is not None and overrides(owner, name, DataHooks)), None)
        for name in _TRANSFER_HOOKS
    ]
