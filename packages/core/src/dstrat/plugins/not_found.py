"""Errors for aliases that are retired, not installed, or unknown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import CatalogError, NotInstalledError, RetiredAliasError, UnknownAliasError
from dstrat.plugins.component import KINDS, Kind
from dstrat.plugins.known import KNOWN, known_class, known_distribution, known_requirement, pip_command
from dstrat.plugins.offer import Plugin, kind_label
from dstrat.plugins.settings import nearest, normalized

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from dstrat.plugins.component import Component

_MOST_NAMES = 12
_STATES = {"disabled": "is disabled", "failed": "could not be loaded", "unsupported": "cannot be used"}


def miss(
    kind: Kind,
    name: str,
    names: Mapping[Kind, Iterable[str]],
    plugins: Sequence[Plugin],
    components: Sequence[Component] = (),
) -> CatalogError:
    """Return the error for a name that no component has.

    Args:
        kind: The requested kind.
        name: The requested name.
        names: The existing names, by kind.
        plugins: All plugins, also those without components.
        components: The components of the kind.
    """
    retired = _retired(kind, name, plugins)
    if retired is not None:
        return RetiredAliasError(retired)
    requirement = known_requirement(kind, name)
    if requirement is not None:
        return NotInstalledError(_not_installed(kind, name, requirement, plugins) + _broken(plugins, requirement))
    return UnknownAliasError(f"{kind_label(kind)} {name!r} {_unknown(kind, name, names, components)}{_broken(plugins)}")


def class_miss(kinds: Iterable[Kind], name: str, plugins: Sequence[Plugin]) -> CatalogError | None:
    """Return the error for a class that no plugin has; None if no distribution is known to have it."""
    for kind in kinds:
        requirement = known_class(kind, name)
        if requirement is not None:
            return NotInstalledError(_not_installed(kind, name, requirement, plugins) + _broken(plugins, requirement))
    return None


def _retired(kind: Kind, name: str, plugins: Sequence[Plugin]) -> str | None:
    for plugin in plugins:
        for tombstone in plugin.tombstones:
            if (tombstone.kind, tombstone.alias) == (kind, name):
                because = f" ({tombstone.reason})" if tombstone.reason else ""
                instead = f"use {tombstone.replacement!r} instead" if tombstone.replacement else "nothing replaces it"
                return f"{kind_label(kind)} {name!r} was retired by {plugin.label}{because}: {instead}"
    return None


def _not_installed(kind: Kind, name: str, requirement: str, plugins: Sequence[Plugin]) -> str:
    distribution = known_distribution(requirement)
    label = f"{kind_label(kind)} {name!r}"
    installed = [plugin for plugin in plugins if normalized(plugin.distribution) == distribution]
    if not installed:
        return f"{label} comes with {distribution}, which is not installed: {pip_command(requirement)}"
    unusable = next((plugin for plugin in installed if plugin.state != "loaded"), None)
    if unusable is not None:
        return f"{label} comes with {unusable.label}, which {_STATES[unusable.state]} ({unusable.reason})"
    upgrade = pip_command(requirement, upgrade=True)
    return f"{label} comes with {distribution}, and the installed {installed[0].label} does not have it: {upgrade}"


def _unknown(kind: Kind, name: str, names: Mapping[Kind, Iterable[str]], components: Sequence[Component]) -> str:
    elsewhere = [other for other in KINDS if other != kind and name in {*names.get(other, ()), *KNOWN.get(other, {})}]
    if elsewhere:
        label = kind_label(elsewhere[0])
        return f"is not known: {name!r} is {'an' if label[0] in 'aeiou' else 'a'} {label}"
    available = sorted(names.get(kind, ()))
    near = nearest(name, [*available, *KNOWN.get(kind, {})])
    if near:
        return f"is not known: did you mean {_alternatives(kind, near, available)}?"
    if len(available) > _MOST_NAMES:
        first = _one_per_class(components)
        shown = sorted([*first, *(name for name in available if name not in first)][:_MOST_NAMES])
        return f"is not known: available are {', '.join(shown)} and {len(available) - _MOST_NAMES} more"
    return f"is not known: available are {', '.join(available) or 'none'}"


def _one_per_class(components: Sequence[Component]) -> list[str]:
    """Return one alias for each class, the one with the fewest preset arguments: the others are its variants."""
    plainest: dict[str, Component] = {}
    for component in sorted(components, key=lambda component: (len(component.options), component.alias)):
        plainest.setdefault(component.target_name, component)
    return sorted(component.alias for component in plainest.values())


def _alternatives(kind: Kind, near: Iterable[str], available: Sequence[str]) -> str:
    hints = ((name, known_requirement(kind, name)) for name in near)
    texts = [
        f"{name!r} ({pip_command(hint)})" if hint and name not in available else repr(name) for name, hint in hints
    ]
    return " or ".join([", ".join(texts[:-1]), texts[-1]] if texts[1:] else texts)


def _broken(plugins: Sequence[Plugin], requirement: str = "") -> str:
    """Return a note about broken plugins, any of which might offer the name."""
    suggested = known_distribution(requirement)
    broken = [f"{p.label}, {p.reason}" for p in plugins if p.is_broken and normalized(p.distribution) != suggested]
    return f" (plugins that do not work: {'; '.join(broken)})" if broken else ""
