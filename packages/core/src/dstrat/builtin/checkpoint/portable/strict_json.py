"""JSON as the format uses it: no constants that are not JSON, no infinite numbers, no key twice, no endless nesting."""

from __future__ import annotations

import json
import math
from typing import Any


def dump_json(value: Any) -> bytes:
    """Return the value as compact ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def parse_json(data: bytes | bytearray | memoryview) -> Any:
    """Return the value of a document.

    Raises:
        ValueError: It is no JSON, has a key twice or a number that no float holds, or is nested too deeply.
    """
    try:
        text = str(data, "utf-8")
        return json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has the key {twice[:80]!r} twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not JSON")


def _finite_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"it holds {digits[:80]}, which is too large for a float")
    return number
