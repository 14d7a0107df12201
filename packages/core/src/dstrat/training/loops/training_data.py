"""Training data of a process: its loader, limits, and batches of an epoch."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from dstrat.data.agreed_length import agreed_length
from dstrat.data.continued import Beginning, ContinuedLoader
from dstrat.data.limits import limit_of, whole_items
from dstrat.data.loaders import length_is_certain, length_of, prepare_training_loader
from dstrat.data.placed import PlacedLoader, knows_its_place
from dstrat.data.unshuffled import unshuffled
from dstrat.errors import ConflictError
from dstrat.training.data.batches import (
    Batches,
    batch_mover,
    device_batches,
    device_to_copy_ahead_to,
    prefetching_strategy,
)

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dstrat.training.data.sources import Sources
    from dstrat.training.module.train_module import TrainModule
    from dstrat.training.trainer import Trainer

_log = logging.getLogger(__name__)


class TrainingData:
    """The training loader of this process.

    Args:
        trainer: Its strategy divides the data; its arguments limit it.

    Attributes:
        loader: What is read, None before it is known.
        num_batches: Number of batches in an epoch, None where the loader has no length or is not known yet.
        beginning: How the epoch began; None before the first.
        batches_per_item: Number of batches in what the loader gives at once: 1, but for compiled training steps that
            consume several.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.loader: Any = None
        self.num_batches: int | None = None
        self.beginning: Beginning | None = None
        self.batches_per_item = 1
        self._loaded_in_epoch = 0
        self._placed: PlacedLoader | None = None

    @property
    def length(self) -> int | None:
        """Number of batches of the whole loader, without a limit; None where it is unknown."""
        length = length_of(self.loader)
        return None if length is None else length * self.batches_per_item

    def load(self, sources: Sources) -> None:
        """Take the loader from where the user gave it, unless that is done; collective."""
        trainer = self._trainer
        if self.loader is None:
            given = sources.loader("train")
            compiled = trainer.strategy.compiled_steps()
            self.batches_per_item = 1 if compiled is None else compiled.batches
            self.loader = prepare_training_loader(
                unshuffled(given) if trainer.overfit_batches else given,
                trainer.strategy,
                distribute=trainer.use_distributed_sampler,
            )
            limit = limit_of(trainer.limit_train_batches, self.length, "limit_train_batches")
            self.num_batches = self._whole_items(limit)

    def _whole_items(self, count: int | None) -> int | None:
        """Return the number of batches that whole items have, and log where it is another one."""
        whole = whole_items(count, self.batches_per_item)
        if whole != count:
            _log.warning(
                "an epoch has %d training batches rather than %d, as one call of the compiled step takes %d",
                whole,
                count,
                self.batches_per_item,
            )
        return whole

    def open(self, sources: Sources, epoch: int) -> None:
        """Take the loader, and agree with the other processes on its length; collective."""
        self.load(sources)
        self._loaded_in_epoch = epoch
        self.num_batches = agreed_length(self._trainer.strategy, self.num_batches)

    def reload_when_due(self, sources: Sources, epoch: int) -> bool:
        """Take another loader where the Trainer was asked to, and return whether it was time; collective then."""
        every = self._trainer.reload_dataloaders_every_n_epochs
        if not every or epoch - self._loaded_in_epoch < every:
            return False
        self.loader = None
        self.open(sources, epoch)
        return True

    def scaled(self, batches_done: int, other_length: int | None) -> int:
        """Return how many batches are the part of an epoch that other processes had done, with another length of it."""
        if not self.length or not other_length:
            return batches_done
        scaled = batches_done * self.length // other_length
        return scaled - scaled % self.batches_per_item

    def check_position(self, batches_done: int) -> None:
        """Check that an epoch can go on after so many batches.

        Raises:
            ConflictError: They end within what one call of a compiled step takes.
        """
        is_over = self.num_batches is not None and batches_done >= self.num_batches
        if batches_done % self.batches_per_item and not is_over:
            raise ConflictError(
                f"the checkpoint was saved after {batches_done} batches of an epoch, and one call of the compiled step "
                f"takes {self.batches_per_item}: resume from one that was saved at the end of an epoch, or after a "
                f"multiple of {self.batches_per_item} batches"
            )

    def place(self, batches_done: int | None) -> Any:
        """Return where a loader that knows its own place was after so many batches, None for other loaders.

        Args:
            batches_done: None at the end of an epoch.
        """
        if self._placed is None:
            return None
        if batches_done is None:
            return self._placed.latest_place
        return self._placed.place_after(batches_done // self.batches_per_item)

    def batches(
        self, module: TrainModule, *, done: int, beginning: Beginning | None, place: Any = None, is_over: bool = False
    ) -> Iterable[tuple[Any, bool]]:
        """Return the items of an epoch that are left, on the device, each with whether it is the last.

        Args:
            module: Whose hooks take part in the transfer.
            done: Number of batches that have been trained on.
            beginning: How the epoch began, where some have been.
            place: Where the loader was then, if it knows that.
            is_over: Whether the last one has been.
        """
        trainer, left = self._trainer, self.num_batches
        done //= self.batches_per_item
        left = None if left is None else left // self.batches_per_item
        if done and beginning is not None:
            self.beginning = beginning
            left = None if left is None else max(0, left - done)
        else:
            self.beginning, done, place = Beginning.of(self.loader), 0, None
        copies_ahead_to = device_to_copy_ahead_to(trainer, module)
        is_read_ahead = copies_ahead_to is not None or left is None or not length_is_certain(self.loader)
        loader = self._read_from(self.beginning, done, place, is_over=is_over, is_read_ahead=is_read_ahead)
        move = trainer.profiled("transfer_batch", batch_mover(trainer, module))
        batches = trainer.profiled_batches(Batches(loader, left, None if done else "training"))
        prefetching = prefetching_strategy(trainer, module, loader)
        return device_batches(batches, move, copies_ahead_to=copies_ahead_to, prefetching=prefetching)

    def keep_place(self) -> None:
        """Keep the place of the loader before something else may read it, such as a validation."""
        if self._placed is not None:
            self._placed.keep_place()

    def _read_from(self, beginning: Beginning, done: int, place: Any, *, is_over: bool, is_read_ahead: bool) -> Any:
        """Return what gives the batches that are left of an epoch."""
        self._placed = None
        if knows_its_place(self.loader) and (place is not None or not done):
            self._placed = PlacedLoader(
                self.loader, beginning, done, place, is_over=is_over and done > 0, is_read_ahead=is_read_ahead
            )
            return self._placed
        return ContinuedLoader(self.loader, beginning, done) if done else self.loader
