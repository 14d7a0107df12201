"""Fingerprint of a catalog, which the ranks of a job compare."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dstrat.plugins.component import Component
from dstrat.plugins.settings import PREFER, PluginSettings

if TYPE_CHECKING:
    from dstrat.plugins.offer import Offer, Plugin

_SHOWN_FIRST = ("kind", "alias", "target", "summary")


def catalog_lines(offers: Iterable[Offer], plugins: Iterable[Plugin], settings: PluginSettings) -> tuple[str, ...]:
    """Return one line per component, retired alias and preference, sorted."""
    components = (_component_line(offer) for offer in offers)
    retired = (
        f"retired {stone.kind} {stone.alias} in favour of {stone.replacement}, by {plugin.label}"
        for plugin in plugins
        for stone in plugin.tombstones
    )
    preferences = (f"{PREFER} {alias}={owner}" for alias, owner in settings.preferred.items())
    return tuple(sorted([*components, *retired, *preferences]))


def digest(lines: Iterable[str]) -> str:
    """Return 16 hexadecimal digits that stand for the lines."""
    import hashlib

    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def _component_line(offer: Offer) -> str:
    component = offer.component
    facts = {
        field.name: _plain(getattr(component, field.name))
        for field in fields(Component)
        if field.name not in _SHOWN_FIRST and getattr(component, field.name) not in (field.default, {})
    }
    details = json.dumps(facts, sort_keys=True)
    return f"{component.kind} {component.alias} from {offer.owner_label}: {component.target_name} {details}"


def _plain(value: Any) -> Any:
    """Reduce a value to what is equal in every process: no addresses, no order of hashes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
