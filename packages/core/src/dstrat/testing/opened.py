"""A strategy that is ready to communicate in a rank, with the parts that the Trainer would give it."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from dstrat.resolve import Request, build, make_plan

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.interfaces.strategy import Strategy
    from dstrat.testing.place import Place
    from dstrat.testing.subject import Subject


def built(
    place: Place, subject: Subject, accelerator: str = "cpu", precision: str = "32-true", plugins: tuple[Any, ...] = ()
) -> Strategy:
    """Return the strategy with all its parts; nothing is opened yet."""
    cluster = (place.cluster,) if subject.component.starts_processes else ()
    request = Request(
        strategy=subject.make(),
        accelerator=accelerator,
        devices=place.world_size * subject.devices_per_process,
        precision=precision,
        plugins=(*cluster, *plugins),
    )
    return build(make_plan(request), request)


@contextmanager
def opened(
    place: Place, subject: Subject, accelerator: str = "cpu", plugins: tuple[Any, ...] = ()
) -> Iterator[Strategy]:
    """Give a strategy whose ranks can communicate, and close it."""
    strategy = built(place, subject, accelerator, plugins=plugins)
    strategy.setup_environment()
    try:
        yield strategy
    finally:
        strategy.teardown()
