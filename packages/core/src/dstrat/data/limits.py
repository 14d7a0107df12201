"""Limits on the number of batches of a loader."""

from __future__ import annotations

from typing import Any

from dstrat.errors import RequestError


def limit_of(limit: float | None, length: int | None, name: str) -> int | None:
    """Return how many batches to take at most; None takes all.

    Args:
        limit: A number of batches (int), a fraction of them (float from 0 to 1), or None.
        length: Number of batches there are, None where unknown.
        name: The argument's name, for messages.

    Raises:
        RequestError: A fraction of an unknown length.
    """
    if limit is None or (limit == 1.0 and isinstance(limit, float)):
        return length
    if isinstance(limit, int):
        return limit if length is None else min(limit, length)
    if length is None:
        raise RequestError(f"{name}={limit!r} is a fraction, and the loader has no length: give a number of batches")
    taken = int(limit * length)
    if taken == 0 and limit > 0 and length > 0:
        raise RequestError(f"{name}={limit!r} of {length} batches is less than one: give a number of batches")
    return taken


def whole_items(count: int | None, per_item: int) -> int | None:
    """Return a number of batches that whole items of a loader have: the largest that is no more, or one item.

    Args:
        count: Number of batches, None where unknown; 0 stays.
        per_item: Number of batches in what the loader gives at once.
    """
    if not count or count % per_item == 0:
        return count
    return max(1, count // per_item) * per_item


def check_limit(limit: Any, name: str) -> None:
    """Raise RequestError unless the limit is None, a count, or a fraction from 0 to 1."""
    counts = isinstance(limit, int) and not isinstance(limit, bool) and limit >= 0
    fraction = isinstance(limit, float) and 0.0 <= limit <= 1.0
    if limit is not None and not counts and not fraction:
        raise RequestError(f"{name}={limit!r} must be a number of batches (int) or a fraction from 0.0 to 1.0 (float)")
