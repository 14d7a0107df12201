"""Checksums of a file, one for each block, so that a part of it can be verified too.

XXH3 (64 bits) takes a tenth of a second for 1 GiB on one core; an accident to a block goes unnoticed once in 2^64.  It
is
no protection against somebody who changes file and checksum together.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import xxhash

from dstrat.builtin.checkpoint.portable.layout import BLOCK

if TYPE_CHECKING:
    from collections.abc import Iterable

DIGITS = 16
"""Hexadecimal digits of one checksum."""


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of one block."""
    return xxhash.xxh3_64_hexdigest(data)


def block_checksums(views: Iterable[memoryview]) -> str:
    """Return the checksums of the blocks of consecutive views that begin at the start of a block."""
    found: list[str] = []
    current, filled = xxhash.xxh3_64(), 0
    for view in views:
        done = 0
        while done < len(view):
            part = view[done : done + BLOCK - filled]
            current.update(part)
            done, filled = done + len(part), filled + len(part)
            if filled == BLOCK:
                found.append(current.hexdigest())
                current, filled = xxhash.xxh3_64(), 0
    if filled:
        found.append(current.hexdigest())
    return "".join(found)


def num_blocks(size: int) -> int:
    """Return how many blocks a file of so many bytes has."""
    return -(-size // BLOCK)


def expected(checksums: str, block: int) -> str:
    """Return the checksum of one block."""
    return checksums[block * DIGITS : (block + 1) * DIGITS]
