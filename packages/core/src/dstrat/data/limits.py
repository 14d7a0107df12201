"""Limits on the number of batches of a loader, and checks of counts."""

from __future__ import annotations

from typing import Any

from dstrat.errors import RequestError


def limit_of(limit: float | None, length: int | None, name: str) -> int | None:
    """Return the largest number of batches to read; None reads all.

    Args:
        limit: A number of batches (int), a fraction of them (float from 0 to 1), or None.
        length: Number of batches of the loader, None where unknown.
        name: The argument's name, for messages.

    Raises:
        RequestError: A fraction of an unknown length.
    """
    if limit is None or (limit == 1.0 and isinstance(limit, float)):  # 1.0 is all batches, and 1 is one
        return length
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if length is None:
        raise RequestError(f"{name}={limit!r} is a fraction, and the loader has no length: give a number of batches")
    count = int(limit * length)
    if count == 0 and limit > 0 and length > 0:  # 0 and 0.0 say that nothing is to be read; this fraction does not
        raise RequestError(f"{name}={limit!r} of {length} batches is less than one: give a number of batches")
    return count


def round_to_items(count: int | None, per_item: int) -> int | None:
    """Round a number of batches down to a multiple of the batches per item, but not below one item.

    Args:
        count: Number of batches, None where unknown; 0 stays.
        per_item: Number of batches in one item of the loader.
    """
    if not count or count % per_item == 0:
        return count
    return max(1, count // per_item) * per_item


def check_limit(limit: Any, name: str) -> None:
    """Raise RequestError unless the limit is None, a count, or a fraction from 0 to 1."""
    counts = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0  # True is an int, and a mistake
    fraction = isinstance(limit, float) and 0.0 <= limit <= 1.0
    if limit is not None and not counts and not fraction:
        raise RequestError(f"{name}={limit!r} must be a number of batches (int) or a fraction from 0.0 to 1.0 (float)")


def check_count(value: Any, name: str, least: int) -> None:
    """Raise a RequestError unless a value is an int of at least ``least``; a bool is not."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise RequestError(f"{name}={value!r} must be an int of at least {least}")
