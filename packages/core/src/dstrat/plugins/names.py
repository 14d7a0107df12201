"""Comparing names: of distributions as pip does, and of aliases as people mistype them."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SEPARATORS = re.compile(r"[-_.]+")
_NOT_LETTERS = re.compile(r"[^a-z0-9]+")


def normalized(distribution: str) -> str:
    """Return a distribution's name in the one spelling that pip compares (PEP 503)."""
    return _SEPARATORS.sub("-", distribution.strip()).lower()


def nearest(name: str, candidates: Iterable[str], *, count: int = 3) -> tuple[str, ...]:
    """Return the candidates that look most like the name, the best one first.

    Case, separators and a class name's ending are looked through: ``"DDPStrategy"`` is near ``"ddp"``.  Where one
    candidate is the same but for those, it is the only answer.
    """
    from difflib import get_close_matches

    by_folded: dict[str, list[str]] = {}
    for candidate in sorted(set(candidates)):
        by_folded.setdefault(_folded(candidate), []).append(candidate)
    wanted = _folded(name)
    folded = [wanted] if wanted in by_folded else get_close_matches(wanted, by_folded, n=count)
    return tuple(candidate for match in folded for candidate in by_folded[match])[:count]


def _folded(name: str) -> str:
    bare = _NOT_LETTERS.sub("", name.lower())
    return re.sub(r"(?<=.)(strategy|accelerator)$", "", bare)
