"""Keeping the processes that do not write from writing."""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, cast

from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.training.loggers.logger import Logger

M = TypeVar("M", bound="Callable[..., None]")


def writer_only(method: M) -> M:
    """Make a logger's method do nothing in the processes that do not write."""

    @wraps(method)
    def in_the_writer(self: Logger, /, *args: Any, **kwargs: Any) -> None:
        if self.writes:
            method(self, *args, **kwargs)

    return cast("M", in_the_writer)


class Silence:
    """What loggers return as ``experiment`` where they do not write: takes every call and does nothing."""

    def __getattr__(self, name: str) -> Self:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Self:
        return self

    def __getitem__(self, key: Any) -> Self:
        return self

    def __setitem__(self, key: Any, value: Any) -> None:
        pass

    def __setattr__(self, name: str, value: Any) -> None:
        pass
