"""Iterating over batches, and moving them to the device."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dstrat.data.ahead import copied_ahead
from dstrat.data.loaders import is_loaded_elsewhere, length_is_certain
from dstrat.errors import MisuseError
from dstrat.interfaces.batch import mover_to
from dstrat.interfaces.strategy import Strategy
from dstrat.training.dispatch import overrides
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.hooks import DataHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Batches:
    """The batches of a loader up to a limit, each with whether it is the last.

    A loader whose length is known is read one batch at a time, so that its random numbers are drawn in the order of
    a hand-written loop; one of unknown length is read one batch ahead.

    Args:
        loader: Any iterable of batches.
        count: Number of batches to take at most, None for all of a loader of unknown length.
        required_for: What needs at least one batch, such as ``"training"``; None does without.
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
            if index >= last:
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
        batches: Such as :class:`Batches` gives them.
        move: Brings a batch (with the index of its loader) to the device, such as :func:`batch_mover` returns it.
        dataloader_idx: Index of the loader among those that are read one after the other.
        copies_ahead_to: The CUDA device to which the next batch is copied during a step; None copies when a batch is
            due.  :func:`device_to_copy_ahead_to` says which.
        prefetching: The strategy that reads and copies batches in threads, as :func:`prefetching_strategy` returns it.
    """
    if prefetching is not None:
        yield from prefetching.prefetch(batches, lambda pair: (move(pair[0], dataloader_idx), pair[1]))
        return
    if copies_ahead_to is not None:
        yield from copied_ahead(batches, lambda batch: move(batch, dataloader_idx), copies_ahead_to)
        return
    for batch, is_last in batches:
        yield move(batch, dataloader_idx), is_last


def device_to_copy_ahead_to(trainer: Trainer, module: TrainModule) -> torch.device | None:
    """Return the device to which batches can be copied during the step before; None where they cannot.

    That needs CUDA, and that nobody else takes part in the transfer, who might rely on its time or on its stream.
    """
    strategy = trainer.strategy
    is_ours = not any(_hook_owners(trainer, module)) and not overrides(strategy, "batch_to_device", Strategy)
    return strategy.root_device if is_ours and strategy.root_device.type == "cuda" else None


def prefetching_strategy(trainer: Trainer, module: TrainModule, loader: Any) -> Strategy | None:
    """Return the strategy where it reads and copies a loader's batches in threads; None where it must not, or does not.

    A hook of the user's that takes part in the transfer is not called in a thread, and a profiler measures in one only.
    """
    strategy = trainer.strategy
    does = overrides(strategy, "prefetch", Strategy) and is_loaded_elsewhere(loader)
    return strategy if does and trainer.profiler is None and not any(_hook_owners(trainer, module)) else None


def batch_mover(trainer: Trainer, module: TrainModule) -> Callable[[Any, int], Any]:
    """Return what brings a batch (with the index of its loader) to the device.

    The module's or data module's transfer hooks take part where they are overridden.
    """
    strategy = trainer.strategy
    before, transfer, after = owners = _hook_owners(trainer, module)
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
    """Return what does the same as the strategy's method; what that looks up per batch is looked up here, once."""
    if overrides(strategy, "batch_to_device", Strategy):
        to_device = strategy.batch_to_device
        return lambda batch, dataloader_idx: to_device(batch)  # noqa: ARG005 - no hook asks for it
    move, convert = mover_to(strategy.root_device), strategy.precision_plugin.convert_input
    return lambda batch, dataloader_idx: convert(move(batch))  # noqa: ARG005 - likewise


def _hook_owners(trainer: Trainer, module: TrainModule) -> list[DataHooks | None]:
    """Return for each transfer hook who overrides it: the data module, the module, or nobody."""
    owners: list[DataHooks | None] = [trainer.datamodule, module]
    return [
        next((owner for owner in owners if owner is not None and overrides(owner, name, _base(owner))), None)
        for name in _TRANSFER_HOOKS
    ]


def _base(owner: DataHooks) -> type:
    return DataModule if isinstance(owner, DataModule) else DataHooks
