"""Prefetching of batches in the threads of torch_xla's loader."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from torch_xla.distributed.parallel_loader import ParallelLoader
from typing_extensions import override

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    import torch

T = TypeVar("T")


class Prefetcher(ParallelLoader):  # type: ignore[misc]  # torch_xla has no types
    """torch_xla's loader, whose threads read items and move them with dstrat's function.

    torch_xla's own transfer skips objects with a method ``to``, and an error in the reading thread would silently end
    the epoch.

    Args:
        items: Batches on the host, with data of the caller.
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

    @override
    def send_cpu_data_to_device(self, batches: list[Any], device: torch.device) -> list[Any]:
        """Return a thread's items on the device; fewer if moving one of them failed."""
        moved: list[Any] = []
        try:
            moved.extend(map(self._move, batches))
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that iterates
            self._failure = error
            self._done = True  # torch_xla's reading thread stops, and the iteration ends after what was moved
        return moved

    def _read(self, items: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from items
        except BaseException as error:  # noqa: BLE001 - likewise
            self._failure = error
