"""Prefetch of the next batch to a device with streams during a step."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from dstrat.interfaces.batch import mover_to, pin_memory
from dstrat.interfaces.strategy import Strategy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

T = TypeVar("T")


def mover_for(strategy: Strategy) -> Callable[[Any], Any]:
    """Return an equivalent of the strategy's ``batch_to_device``, with its look-ups done once instead of per batch.

    On a device with streams, batches are copied from pinned memory, so that the host does not wait for the device.
    """
    to_device = strategy.batch_to_device
    if getattr(to_device, "__func__", None) is not Strategy.batch_to_device:
        return (lambda batch: to_device(pin_memory(batch))) if strategy.copies_ahead else to_device
    has_streams = strategy.accelerator.has_streams
    move = mover_to(strategy.root_device, non_blocking=has_streams, pins=has_streams)
    convert = strategy.precision_plugin.convert_input
    return lambda batch: convert(move(batch))


def move_batches(
    items: Iterable[T], move: Callable[[T], T], strategy: Strategy, *, in_threads: bool, ahead: bool
) -> Iterator[T]:
    """Return the items after ``move``.

    Args:
        items: Batches on the host, with data of the caller.
        move: Returns an item with its batch on the device.
        strategy: Has the device.
        in_threads: Whether the strategy prefetches the items in threads.
        ahead: Whether the next item is copied during a step; otherwise each is moved when it is needed.
    """
    if in_threads:
        return strategy.prefetch(items, move)
    if ahead:
        return prefetch(items, move, strategy.root_device)
    return map(move, items)  # no generator, which would cost time per batch


def prefetch(items: Iterable[T], move: Callable[[T], T], device: torch.device) -> Iterator[T]:
    """Yield items on the device, and start the copy of the next one before each is yielded.

    A copy runs on a separate stream.  It waits for the step that was queued last, and overlaps with the step of the
    batch that is yielded.

    Args:
        items: Batches on the host, with data of the caller.
        move: Returns an item with its batch on the device, on the current stream; from pinned memory, as the host
            waits until the step has ended in copies from other memory.
        device: A device of torch's current accelerator, which has streams.
    """
    copies = _copy_stream(device)

    def start(item: T) -> tuple[T, torch.Event]:
        # So that the memory of an old batch is reused only when no step reads it, without record_stream.
        copies.wait_stream(torch.accelerator.current_stream(device))
        with copies:
            return move(item), copies.record_event()

    ready: tuple[T, torch.Event] | None = None
    for item in items:
        # Queued before the batch is yielded, and so before its step: the copy does not wait for that one.
        following = start(item)
        if ready is not None:
            yield _awaited(ready, device)
        ready = following
    if ready is not None:
        yield _awaited(ready, device)


@cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """Return the stream of this process on which batches are copied to a device."""
    # One: torch keeps freed memory for the stream that allocated it, and one of each epoch would leave its batches.
    return torch.Stream(device)


def _awaited(copied: tuple[T, torch.Event], device: torch.device) -> T:
    """Make the current stream wait for a copy; return its item."""
    item, event = copied
    torch.accelerator.current_stream(device).wait_event(event)
    return item
