"""Environment variables for plugins: disabled ones, strict mode, preferred owners."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from dstrat.errors import RequestError
from dstrat.plugins.names import normalized

if TYPE_CHECKING:
    from collections.abc import Mapping

DISABLE = "DSTRAT_DISABLE_PLUGINS"
STRICT = "DSTRAT_STRICT_PLUGINS"
PREFER = "DSTRAT_PREFER"

_YES = frozenset({"1", "true", "yes", "on"})
_NO = frozenset({"", "0", "false", "no", "off"})


@dataclass(frozen=True, kw_only=True, slots=True)
class PluginSettings:
    """The settings in force.

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
    alias, separator, owner = (part.strip() for part in item.partition("="))
    if not (alias and separator and owner):
        raise RequestError(
            f"{item!r} in {PREFER} is not understood: write alias=distribution, "
            f'for example {PREFER}="my_strategy=acme-strategies,other=dstrat-other"'
        )
    return alias, normalized(owner)
