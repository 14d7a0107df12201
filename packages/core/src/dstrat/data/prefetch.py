"""Prefetch of the next batch to a device with streams during a step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from dstrat.interfaces.batch import pin_memory

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator


def prefetch(
    batches: Iterable[tuple[Any, bool]], move: Callable[[Any], Any], device: torch.device
) -> Iterator[tuple[Any, bool]]:
    """Yield batches on the device, and start the copy of the next one before each is yielded.

    A copy runs on a separate stream, from pinned memory.  It waits for the step that was queued last, and overlaps
    with the step of the batch that is yielded.

    Args:
        batches: On the host, each with whether it is the last.
        move: Brings a batch to the device, on the current stream.
        device: A device of torch's current accelerator, which has streams.
    """
    copies = torch.Stream(device)

    def start(host_batch: Any) -> tuple[Any, torch.Event]:
        pinned = pin_memory(host_batch)  # from other memory, the copy would block the host until the step has ended
        # So that the memory of an old batch is reused only when no step reads it, without record_stream.
        copies.wait_stream(torch.accelerator.current_stream(device))
        with copies:
            return move(pinned), copies.record_event()

    ready: tuple[Any, torch.Event, bool] | None = None
    for host_batch, is_last in batches:
        # Queued before the batch is yielded, and so before its step: the copy does not wait for that one.
        following = (*start(host_batch), is_last)
        if ready is not None:
            yield _awaited(ready, device)
        ready = following
    if ready is not None:
        yield _awaited(ready, device)


def _awaited(copied: tuple[Any, torch.Event, bool], device: torch.device) -> tuple[Any, bool]:
    """Make the current stream wait for a copy; return its batch."""
    batch, event, is_last = copied
    torch.accelerator.current_stream(device).wait_event(event)
    return batch, is_last
