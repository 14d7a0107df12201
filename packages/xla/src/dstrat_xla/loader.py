"""Batches that torch_xla's loader reads and copies in threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch_xla.distributed.parallel_loader import ParallelLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

T = TypeVar("T")


class Prefetcher(ParallelLoader):  # type: ignore[misc]  # torch_xla has no types
    """torch_xla's loader around items that dstrat moves, which it only reads and keeps ready.

    Its own way to move a batch leaves out what has a ``to`` of its own, and an error in the thread that reads would
    end the epoch without a word.

    Args:
        items: Batches on the host, with what the caller wants back of each.
        move: Returns an item with its batch on the device.
        device: The device.
    """

    def __init__(self, items: Iterable[Any], move: Callable[[Any], Any], device: torch.device) -> None:
        self._move, self._device = move, device
        self._failure: BaseException | None = None
        super().__init__(self._read(items), [device])  # which starts the threads

    def __iter__(self) -> Iterator[Any]:
        try:
            while (item := self.next_item(self._device)) is not None:
                yield item
            if self._failure is not None:
                raise self._failure
        finally:
            self.close()

    def send_cpu_data_to_device(self, batches: list[Any], device: torch.device) -> list[Any]:  # noqa: ARG002 - known
        """Return the items that a thread has taken, on the device; fewer where moving one of them failed."""
        moved: list[Any] = []
        try:
            moved.extend(map(self._move, batches))
        except BaseException as error:  # noqa: BLE001 - raised where the items are used
            self._failure = error
            self._done = True
        return moved

    def _read(self, items: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from items
        except BaseException as error:  # noqa: BLE001 - likewise
            self._failure = error
