"""Lengths of time as users write them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

from dstrat.errors import RequestError

_WRITTEN = re.compile(r"(?:(\d+):)?(\d+):(\d{1,2}):(\d{1,2})")


def read_duration(given: Any, name: str) -> timedelta:
    """Return a length of time.

    Args:
        given: A timedelta, a dict of its arguments such as ``{"hours": 1}``, or text: ``"DD:HH:MM:SS"``,
            ``"HH:MM:SS"``.
        name: What it was given for, for the message.

    Raises:
        RequestError: It is none of these, or not more than nothing.
    """
    duration = _read(given)
    if duration is None or duration <= timedelta(0):
        raise RequestError(
            f"{name}={given!r} is not a length of time: give a timedelta, a dict such as {{'hours': 1}}, "
            "or text as 'DD:HH:MM:SS' or 'HH:MM:SS'"
        )
    return duration


def _read(given: Any) -> timedelta | None:
    if isinstance(given, timedelta):
        return given
    if isinstance(given, Mapping):
        try:
            return timedelta(**given)
        except TypeError:
            return None
    match = _WRITTEN.fullmatch(given) if isinstance(given, str) else None
    if match is None:
        return None
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds)
