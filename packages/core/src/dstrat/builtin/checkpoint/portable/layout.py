"""The names and limits of the format; ``docs/checkpoint-format.md`` describes them."""

from __future__ import annotations

import re

FORMAT = "dstrat-checkpoint"
FORMAT_VERSION = 1

MANIFEST = "manifest.json"
STATE = "state.json"
INDEX = "tensors.json"
LAST = "last"
"""The pointer beside the checkpoints: a file that holds the name of the newest one."""

PER_RANK = "per_rank"
"""The key of a checkpoint under which each rank keeps what is only its own."""
SAVED_WITH = "saved_with"
"""The key under which a checkpoint names the strategy that it was saved with; the manifest names it too."""

MEBIBYTE = 1024 * 1024
BLOCK = MEBIBYTE
"""Bytes that share one checksum."""
BUCKET = 8 * MEBIBYTE
"""Bytes that one thread handles at a time; a multiple of :data:`BLOCK`."""
THREADS = 4
LARGEST_JSON = 256 * MEBIBYTE
DEEPEST_NESTING = 100
LARGEST_DIMENSIONS = 64

_FILE_NAME = re.compile(r"state\.json|tensors\.json|rank-[0-9]{5,7}\.(json|safetensors)")


def rank_file(rank: int, kind: str) -> str:
    """Return the name of a file that one rank writes; the kind is ``"json"`` or ``"safetensors"``."""
    return f"rank-{rank:05d}.{kind}"


def is_file_name(name: object) -> bool:
    """Return whether a manifest may list a file of that name."""
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None
