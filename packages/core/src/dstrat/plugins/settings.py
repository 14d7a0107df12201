"""Names of distributions, and environment variables for plugins."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING

from dstrat.errors import RequestError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


# Names: of distributions as pip compares them, and of mistyped aliases


_SEPARATORS = re.compile(r"[-_.]+")
_LEAST_SCORE = 0.6
_SCORE_MARGIN = 0.15  # a candidate that is this much worse than the best one is no suggestion
_NOT_LETTERS = re.compile(r"[^a-z0-9]+")


@lru_cache(maxsize=1024)  # each look-up compares the owners of all offers
def normalized(distribution: str) -> str:
    """Return a distribution's normalized name (PEP 503)."""
    return _SEPARATORS.sub("-", distribution.strip()).lower()


def nearest(name: str, candidates: Iterable[str], *, count: int = 3, least: float = _LEAST_SCORE) -> tuple[str, ...]:
    """Return the candidates that are most similar to the name, the best one first.

    Case, separators and a class name's ending are ignored: ``"DDPStrategy"`` is near ``"ddp"``.  A candidate that is
    equal but for those is the only result.

    Args:
        name: The misspelled name.
        candidates: The names that exist.
        count: The maximal number of results.
        least: The minimal similarity, up to 1.
    """
    from difflib import SequenceMatcher

    matcher = SequenceMatcher(b=_folded(name))
    scores: dict[str, float] = {}
    for candidate in sorted(set(candidates)):
        matcher.set_seq1(_folded(candidate))
        is_possible = matcher.quick_ratio() >= least  # an upper bound, which takes a fraction of the time
        scores[candidate] = matcher.ratio() if is_possible else 0.0
    best = max(scores.values(), default=0.0)
    least = 1.0 if best == 1.0 else max(least, best - _SCORE_MARGIN)
    near = (candidate for candidate, score in scores.items() if score >= least)
    return tuple(sorted(near, key=lambda candidate: -scores[candidate])[:count])


def _folded(name: str) -> str:
    bare = _NOT_LETTERS.sub("", name.lower())
    return re.sub(r"(?<=.)(strategy|accelerator)$", "", bare)


DISABLE = "DSTRAT_DISABLE_PLUGINS"
STRICT = "DSTRAT_STRICT_PLUGINS"
PREFER = "DSTRAT_PREFER"

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginSettings:
    """Settings of plugins, from environment variables.

    Attributes:
        disabled: Normalized names of the distributions that are not to be loaded.
        strict: Whether a plugin that cannot be used is an error.
        preferred: For an alias, the normalized name of the distribution that provides it.
    """

    disabled: frozenset[str] = frozenset()
    strict: bool = False
    preferred: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> PluginSettings:
        """Read the three variables.

        Raises:
            RequestError: One of them cannot be understood.
        """
        return cls(
            disabled=frozenset(normalized(name) for name in _items(environ, DISABLE)),
            strict=_is_on(environ, STRICT),
            preferred=_preferences(_items(environ, PREFER)),
        )


def _items(environ: Mapping[str, str], variable: str) -> list[str]:
    return [item.strip() for item in environ.get(variable, "").split(",") if item.strip()]


def _is_on(environ: Mapping[str, str], variable: str) -> bool:
    value = environ.get(variable, "").strip().lower()
    if value not in _YES | _NO:
        raise RequestError(f"{variable}={environ[variable]!r} is not understood: set it to 1 or 0")
    return value in _YES


def _preferences(items: list[str]) -> dict[str, str]:
    preferred: dict[str, str] = {}
    for alias, owner in map(_preference, items):
        if preferred.setdefault(alias, owner) != owner:
            raise RequestError(f"{PREFER} names two distributions for {alias!r}: {preferred[alias]} and {owner}")
    return preferred


def _preference(item: str) -> tuple[str, str]:
    alias, separator, owner = (text.strip() for text in item.partition("="))
    if not (alias and separator and owner):
        raise RequestError(
            f"{item!r} in {PREFER} is not understood: write alias=distribution, "
            f'for example {PREFER}="my_strategy=acme-strategies,other=dstrat-other"'
        )
    return alias, normalized(owner)
