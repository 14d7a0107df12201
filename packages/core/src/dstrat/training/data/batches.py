"""Iterating over batches, and moving them to the device."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from dstrat.training.data.loaders import length_of
from dstrat.training.dispatch import overrides
from dstrat.training.module.data_module import DataModule
from dstrat.training.module.hooks import DataHooks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    """

    def __init__(self, loader: Any, count: int | None) -> None:
        self._loader = loader
        self._count = count

    def __iter__(self) -> Iterator[tuple[Any, bool]]:
        if self._count is None or length_of(self._loader) is None:
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
        while current is not nothing:
            following = next(iterator, nothing)
            yield current, following is nothing
            current = following


def batch_mover(trainer: Trainer, module: TrainModule) -> Callable[[Any, int], Any]:
    """Return what brings a batch (with the index of its loader) to the device.

    The module's or data module's transfer hooks take part where they are overridden.
    """
    owners = [trainer.datamodule, module]
    chosen = {
        name: next((owner for owner in owners if owner is not None and overrides(owner, name, _base(owner))), None)
        for name in _TRANSFER_HOOKS
    }
    strategy = trainer.strategy
    if not any(chosen.values()):
        return lambda batch, dataloader_idx: strategy.batch_to_device(batch)  # noqa: ARG005 - no hook asks for it
    before, transfer, after = (chosen[name] for name in _TRANSFER_HOOKS)

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


def _base(owner: DataHooks) -> type:
    return DataModule if isinstance(owner, DataModule) else DataHooks
