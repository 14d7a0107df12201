"""Sizes in bytes, for people."""

from __future__ import annotations

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def readable_size(num_bytes: int) -> str:
    """Return a size such as ``"1.5 GiB"``."""
    size = float(num_bytes)
    for unit in _UNITS[:-1]:
        if size < 1023.95:
            return f"{num_bytes} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} {_UNITS[-1]}"
