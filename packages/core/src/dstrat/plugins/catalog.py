"""Catalog: components by kind and alias, the choice between owners, and the fingerprint."""

from __future__ import annotations

import importlib
import json
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import fields
from importlib.metadata import MetadataPathFinder
from itertools import groupby
from typing import TYPE_CHECKING, Any

from dstrat.errors import AmbiguousAliasError, InvalidComponentError, PluginError, RequestError
from dstrat.plugins.component import KINDS, Component, Kind
from dstrat.plugins.discovery import discover
from dstrat.plugins.facts import declares_all, with_class_facts
from dstrat.plugins.not_found import miss
from dstrat.plugins.offer import (
    CORE,
    THIS_PROCESS,
    AdapterOffer,
    Offer,
    Plugin,
    check_requirements,
    class_names,
    kind_label,
    load_class,
    missing_requirements,
)
from dstrat.plugins.options import parse_alias
from dstrat.plugins.settings import DISABLE, PREFER, STRICT, PluginSettings, normalized

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.errors import CatalogError


class Catalog:
    """All components of the installed distributions, and those registered in this process.

    Args:
        environ: Where the settings come from.

    Attributes:
        settings: Settings of plugins, from the environment variables.

    Raises:
        RequestError: A setting cannot be understood.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.settings = PluginSettings.from_environ(environ)
        self._registered: tuple[Offer, ...] = ()
        self._satisfied: set[Offer] = set()
        self._loaded: dict[Offer, type[Any]] = {}
        self._facts: dict[Offer, Component] = {}
        self._with_options: dict[tuple[Kind, str], Offer] = {}
        self.refresh()

    def refresh(self) -> None:
        """Discover the installed plugins again; components registered in this process stay.

        Modules that are imported already are not imported again: an upgraded plugin needs a new process.
        """
        importlib.invalidate_caches()
        MetadataPathFinder().invalidate_caches()  # before Python 3.13 the line above does not do this
        self._plugins = discover(self.settings)
        self._installed = tuple(
            Offer(component=component, owner=plugin.distribution, version=plugin.version)
            for plugin in self._plugins
            for component in plugin.components
        )
        self._index()

    def _index(self) -> None:
        """Sort all offers by kind and name; called whenever one comes or goes."""
        offers = sorted(
            (*self._registered, *self._installed),
            key=lambda offer: (offer.component.alias, normalized(offer.owner)),  # the same on every rank
        )
        self._by_kind = {kind: [offer for offer in offers if offer.component.kind == kind] for kind in KINDS}
        self._by_name: dict[tuple[Kind, str], list[Offer]] = {}
        for offer in offers:
            for name in offer.names:
                self._by_name.setdefault((offer.component.kind, name), []).append(offer)
        preferred = self.settings.preferred
        self._visible = {
            kind: tuple(
                offer
                for alias, group in groupby(of_kind, key=lambda offer: offer.component.alias)
                for offer in visible(list(group), preferred.get(alias))
            )
            for kind, of_kind in self._by_kind.items()
        }
        # Only successes are cached, so that a requirement that is installed later is found.
        for cache in (self._satisfied, self._loaded, self._facts, self._with_options):
            cache.clear()

    @property
    def plugins(self) -> tuple[Plugin, ...]:
        """All discovered plugins, in any state, in the order of distribution, entry point and value."""
        return self._plugins

    def find(self, kind: Kind, name: str) -> Offer:
        """Look up a component.

        Args:
            kind: Kind of the component.
            name: Its alias or a synonym of it, or ``"alias@distribution"``; options may follow, as in
                ``"alias(count=2)"``, which the component of the result has too.

        Raises:
            RequestError: The options cannot be understood, or the name stands for a choice.
            AmbiguousAliasError: Several distributions offer it and none is preferred, or not the one that was named.
            RetiredAliasError: It was renamed or retired.
            NotInstalledError: A known distribution offers it, and is not installed.
            UnknownAliasError: No distribution is known to offer it.
            PluginError: Strict mode is on, and a plugin does not work.
        """
        self._check_strict()
        text = parse_alias(name)
        alias = text.alias
        candidates = self._by_name.get((kind, alias), [])
        if text.owner is not None:
            offer = of_owner(kind, alias, text.owner, candidates)
        elif candidates:
            offer = choose(kind, alias, candidates, self.settings.preferred.get(alias))
        else:
            offer = None
        if offer is None:
            if text.options:
                self._check_no_choice(kind, alias, name)
            raise self._miss(kind, alias)
        if not text.options:
            return offer
        # One object for a text, as the caches are by offer.
        return self._with_options.setdefault((kind, name), offer.with_options(text.options))

    def find_default(self, kind: Kind, alias: str) -> Offer:
        """Look up the component for an unset argument: the core's, unless the user prefers another.

        A plugin that offers the same alias does not change the default.
        """
        self._check_strict()
        offers = visible(self._by_name.get((kind, alias), []), self.settings.preferred.get(alias))
        return offers[0] if len(offers) == 1 else self.find(kind, f"{alias}@{CORE}")

    def offers(self, kind: Kind) -> tuple[Offer, ...]:
        """Return the available offers, sorted by alias and owner.

        An alias that several distributions offer occurs several times, unless one of them is preferred.

        Raises:
            PluginError: Strict mode is on, and a plugin does not work.
        """
        self._check_strict()
        return self._visible[kind]

    def name_of(self, offer: Offer) -> str:
        """Return the shortest text by which :meth:`find` finds an available offer: with its owner if others have it."""
        alias = offer.component.alias
        offers = visible(self._by_name[offer.component.kind, alias], self.settings.preferred.get(alias))
        return offer.alias_text if [one.owner for one in offers] == [offer.owner] else offer.full_alias

    def load(self, offer: Offer) -> type[Any]:
        """Import and return the class of an offered component.

        Raises:
            MissingRequirementError: It cannot be imported, and something that it requires is missing.
            BrokenComponentError: It cannot be imported, or is not a complete class of its kind.
        """
        if offer not in self._loaded:
            self._loaded[offer] = load_class(offer)
        return self._loaded[offer]

    def facts(self, offer: Offer) -> Component:
        """Return the record of an offered component, completed by its class, which is imported only if it must be.

        Raises:
            CatalogError: The class is needed, and cannot be used.
        """
        if offer not in self._facts:
            record = offer.component
            self._facts[offer] = record if declares_all(record) else with_class_facts(record, self.load(offer))
        return self._facts[offer]

    def missing_requirements(self, offer: Offer) -> tuple[str, ...]:
        """Return the requirements of a component that no installed distribution satisfies."""
        return missing_requirements(offer)

    def check_requirements(self, offer: Offer) -> None:
        """Raise MissingRequirementError, with the install command, unless all requirements are satisfied."""
        if offer not in self._satisfied:
            check_requirements(offer)
            self._satisfied.add(offer)

    def register(self, component: Component, *, override: bool = False) -> Offer:
        """Add a component to this process.

        Args:
            component: Its target may be the class itself, which is checked.
            override: Whether it may take an alias that is offered already.

        Raises:
            InvalidComponentError: The alias is in use.
            BrokenComponentError: The class is not a complete class of its kind.
        """
        offer = Offer(component=component, owner=THIS_PROCESS, version="")
        for name in offer.names:
            existing = self._by_name.get((component.kind, name))
            if existing and not override:
                raise InvalidComponentError(
                    f"{kind_label(component.kind)} {name!r} is offered already, by {existing[0].owner_label}: "
                    "choose another name, or pass override=True to replace it in this process"
                )
        load_class(offer)
        self._registered = (*self._registered_except(component.kind, component.alias), offer)
        self._index()
        return offer

    def unregister(self, kind: Kind, alias: str) -> None:
        """Remove a component that was registered in this process.

        Raises:
            CatalogError: No component has that name.
            InvalidComponentError: It was not registered in this process.
        """
        offer = self.find(kind, alias)
        if offer.owner != THIS_PROCESS:
            raise InvalidComponentError(
                f"{offer.title} was not registered in this process: uninstall {offer.owner}, "
                f"or set {DISABLE}={offer.owner}"
            )
        self._registered = self._registered_except(kind, offer.component.alias)
        self._index()

    def find_adapter(self, cls: type) -> AdapterOffer | None:
        """Return the conversion of objects of another library's class; None where no plugin has one.

        Of several the one for the nearest base class counts.

        Raises:
            AmbiguousAliasError: Several distributions convert it.
        """
        offers = [
            AdapterOffer(adapter=adapter, plugin=plugin) for plugin in self._plugins for adapter in plugin.adapters
        ]
        if not offers:
            return None
        for name in class_names(cls):
            matches = [offer for offer in offers if name in offer.adapter.foreign]
            if len(matches) > 1:
                owners = " and ".join(offer.plugin.label for offer in matches)
                raise AmbiguousAliasError(
                    f"{name} is converted by {owners}: set {DISABLE}={matches[0].plugin.distribution}, or uninstall one"
                )
            if matches:
                return matches[0]
        return None

    @property
    def fingerprint_lines(self) -> tuple[str, ...]:
        """All facts that resolution depends on, one per line, sorted; the same for equal catalogs on any machine."""
        return catalog_lines((*self._installed, *self._registered), self._plugins, self.settings)

    @property
    def fingerprint(self) -> str:
        """A short digest of :attr:`fingerprint_lines`, for comparing the catalogs of two processes."""
        return digest(self.fingerprint_lines)

    def _registered_except(self, kind: Kind, alias: str) -> tuple[Offer, ...]:
        return tuple(
            offer for offer in self._registered if (offer.component.kind, offer.component.alias) != (kind, alias)
        )

    def _miss(self, kind: Kind, alias: str) -> CatalogError:
        """Return the error for an alias that nobody offers."""
        names = {
            other: {name for offer in offers for name in (*offer.names, *offer.component.groups)}
            for other, offers in self._by_kind.items()
        }
        return miss(kind, alias, names, self._plugins, [offer.component for offer in self._by_kind[kind]])

    def _check_no_choice(self, kind: Kind, alias: str, name: str) -> None:
        """Raise RequestError where an alias with options stands for a choice between components."""
        members = [offer.component.alias for offer in self._by_kind[kind] if alias in offer.component.groups]
        if members or alias == "auto":
            example = f", such as {members[0]!r}" if members else ""
            raise RequestError(
                f"{kind_label(kind)} {name!r}: {alias!r} stands for a choice, and has no options of its own: "
                f"give them to a component{example}"
            )

    def _check_strict(self) -> None:
        if not self.settings.strict:
            return
        broken = [f"{plugin.label} ({plugin.reason})" for plugin in self._plugins if plugin.is_broken]
        if broken:
            raise PluginError(
                f"{STRICT} is on, and these plugins do not work: {'; '.join(broken)}. "
                f"Repair or uninstall them, or name them in {DISABLE}"
            )


_lock = threading.RLock()
_current: Catalog | None = None
_is_building = False


def get_catalog() -> Catalog:
    """Return the catalog of this process, built on first use from ``os.environ``.

    Raises:
        RequestError: A setting cannot be understood.
        PluginError: A plugin asks for the catalog while it is being loaded.
    """
    global _current, _is_building  # noqa: PLW0603 - one catalog per process
    with _lock:
        if _is_building:
            raise PluginError("the catalog is being built: a plugin must return its components from the hook instead")
        if _current is None:
            _is_building = True
            try:
                _current = Catalog(os.environ)
            finally:
                _is_building = False
        return _current


def refresh_catalog() -> Catalog:
    """Return the catalog of this process after it has discovered the installed plugins again."""
    catalog = get_catalog()
    catalog.refresh()
    return catalog


# Choice between distributions that offer the same alias


def visible(candidates: Sequence[Offer], preferred: str | None) -> Sequence[Offer]:
    """Return the offers of an alias that remain: one registered in this process, else the preferred one, else all."""
    registered = [offer for offer in candidates if offer.owner == THIS_PROCESS]
    return registered or [offer for offer in candidates if normalized(offer.owner) == preferred] or candidates


def choose(kind: Kind, alias: str, candidates: Sequence[Offer], preferred: str | None) -> Offer:
    """Return the only offer of an alias.

    Args:
        kind: The requested kind.
        alias: The requested alias.
        candidates: The offers with that name, at least one.
        preferred: Normalized name of the distribution that the user prefers for it.

    Raises:
        AmbiguousAliasError: Several distributions offer it and none is preferred, or the preferred one does not.
    """
    offers = visible(candidates, preferred)
    if offers[0].owner == THIS_PROCESS or (len(candidates) == 1 and preferred is None):
        return offers[0]
    label = f"{kind_label(kind)} {alias!r}"
    if preferred is not None and normalized(offers[0].owner) != preferred:
        raise AmbiguousAliasError(
            f"{PREFER} wants {label} from {preferred}, which does not offer it: it is offered by {_owners(candidates)}"
        )
    if len(offers) > 1:
        first = offers[0].owner
        raise AmbiguousAliasError(
            f"{label} is offered by {_owners(candidates)}: write '{alias}@{first}', or set {PREFER}=\"{alias}={first}\""
        )
    return offers[0]


def of_owner(kind: Kind, alias: str, owner: str, candidates: Sequence[Offer]) -> Offer | None:
    """Return the offer of one distribution; None if no distribution offers the alias.

    Raises:
        AmbiguousAliasError: Other distributions offer it, and this one does not.
    """
    for offer in candidates:
        if normalized(offer.owner) == normalized(owner):
            return offer
    if not candidates:
        return None
    raise AmbiguousAliasError(
        f"{kind_label(kind)} {alias!r} is not offered by {owner!r}: it is offered by {_owners(candidates)}"
    )


def _owners(candidates: Sequence[Offer]) -> str:
    labels = [offer.owner_label for offer in candidates]
    return " and ".join([", ".join(labels[:-1]), labels[-1]] if labels[1:] else labels)


# Fingerprint of a catalog, which the ranks of a job compare


_SHOWN_FIRST = ("kind", "alias", "target", "summary")


def catalog_lines(offers: Iterable[Offer], plugins: Iterable[Plugin], settings: PluginSettings) -> tuple[str, ...]:
    """Return one line per component, retired alias, conversion and preference, sorted."""
    components = (_component_line(offer) for offer in offers)
    retired = (
        f"retired {stone.kind} {stone.alias} in favour of {stone.replacement}, by {plugin.label}"
        for plugin in plugins
        for stone in plugin.tombstones
    )
    adapters = (
        f"adapter of {', '.join(adapter.foreign)} by {adapter.target} of {plugin.label}"
        for plugin in plugins
        for adapter in plugin.adapters
    )
    preferences = (f"{PREFER} {alias}={owner}" for alias, owner in settings.preferred.items())
    return tuple(sorted([*components, *retired, *adapters, *preferences]))


def digest(lines: Iterable[str]) -> str:
    """Return a hash of the lines, of 16 hexadecimal digits."""
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
    """Convert a value to one that is equal in every process, without addresses and the order of hashes."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_plain(item), sort_keys=True) for item in value)
    return f"<{type(value).__module__}.{type(value).__qualname__}>"
