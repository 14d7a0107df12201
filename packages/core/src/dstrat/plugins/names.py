"""Comparing names: of distributions as pip does, and of aliases as people mistype them."""

from __future__ import annotations

import re
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_SEPARATORS = re.compile(r"[-_.]+")
_LEAST_SCORE = 0.6
_SCORE_MARGIN = 0.15  # what is so much worse than the best one is noise beside it
_NOT_LETTERS = re.compile(r"[^a-z0-9]+")


@lru_cache(maxsize=1024)  # each look-up compares the owners of all that is offered
def normalized(distribution: str) -> str:
    """Return a distribution's name in the one spelling that pip compares (PEP 503)."""
    return _SEPARATORS.sub("-", distribution.strip()).lower()


def nearest(name: str, candidates: Iterable[str], *, count: int = 3) -> tuple[str, ...]:
    """Return the candidates that look most like the name, the best one first.

    Case, separators and a class name's ending are looked through: ``"DDPStrategy"`` is near ``"ddp"``.  Where one
    candidate is the same but for those, it is the only answer.
    """
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(b=_folded(name))
    scores: dict[str, float] = {}
    for candidate in sorted(set(candidates)):
        matcher.set_seq1(_folded(candidate))
        is_possible = matcher.quick_ratio() >= _LEAST_SCORE  # an upper bound, which takes a fraction of the time
        scores[candidate] = matcher.ratio() if is_possible else 0.0
    best = max(scores.values(), default=0.0)
    least = 1.0 if best == 1.0 else max(_LEAST_SCORE, best - _SCORE_MARGIN)
    near = (candidate for candidate, score in scores.items() if score >= least)
    return tuple(sorted(near, key=lambda candidate: -scores[candidate])[:count])


def _folded(name: str) -> str:
    bare = _NOT_LETTERS.sub("", name.lower())
    return re.sub(r"(?<=.)(strategy|accelerator)$", "", bare)
