"""Selection of a component for a run: by alias, from a class, or a user's instance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dstrat.errors import DstratError, MisuseError, RequestError
from dstrat.interfaces.accelerator import Accelerator
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.interfaces.cluster import ClusterEnvironment
from dstrat.interfaces.launcher import Launcher
from dstrat.interfaces.precision import Precision
from dstrat.interfaces.strategy import Strategy
from dstrat.plugins.component import Component
from dstrat.plugins.facts import accelerator_facts, facts_of_subclass, strategy_facts, with_class_facts
from dstrat.plugins.offer import kind_label
from dstrat.plugins.options import options_text
from dstrat.plugins.registry import inherited_record, is_target
from dstrat.resolve.plan import PlanRow

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Kind
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.request import Requested


T = TypeVar("T")

INTERFACES: dict[Kind, type[Any]] = {
    "strategy": Strategy,
    "accelerator": Accelerator,
    "precision": Precision,
    "checkpoint_io": CheckpointIO,
    "cluster_environment": ClusterEnvironment,
    "launcher": Launcher,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Selection(Generic[T]):
    """A component of the run, constructed, with its facts and the reason for it.

    Attributes:
        kind: The kind of component.
        name: Its alias, or the name of its class where the user passed a class or an instance.
        instance: The object.
        record: Its record; for a class that is not in the catalog that of its nearest base, or None.
        facts: Its facts: those of the record, completed and corrected by the class or the instance.
        offer: The offer that its alias stands for; None where the user passed a class or an instance.
        reason: Why it was selected, a few words.
    """

    kind: Kind
    name: str
    instance: T
    facts: Component
    record: Component | None = None
    offer: Offer | None = None
    reason: str = ""

    @property
    def title(self) -> str:
        """The component as error messages name it."""
        return f"{kind_label(self.kind)} {self.name}" if self.offer is None else self.offer.title

    @property
    def alias(self) -> str:
        """Its alias, also where the user passed its class or an instance; the name of a class that has none."""
        record = self.record
        return record.alias if record is not None and is_target(record.target, type(self.instance)) else self.name

    @property
    def names(self) -> frozenset[str]:
        """Aliases and groups by which records refer to it; empty where it has no record."""
        record = self.record
        return frozenset({record.alias, *record.synonyms, *record.groups}) if record else frozenset()

    def row(self, subject: str, value: str | None = None) -> PlanRow:
        """Return the plan's row for it."""
        value = value or self.name
        if self.offer is None:
            return PlanRow(subject=subject, value=value, reason=self.reason)
        value += options_text(self.offer.options)
        return PlanRow(subject=subject, value=value, reason=self.reason, owner=self.offer.owner_label)


# Selection by alias, class or instance


def select(kind: Kind, requested: Requested, catalog: Catalog, *arguments: Any) -> Selection[Any]:
    """Select a component that the user requested by an alias, a class or an instance.

    Args:
        kind: The kind of component.
        requested: The alias, class or instance.
        catalog: Where aliases are looked up.
        *arguments: For the constructor, unless the user constructed it.

    Raises:
        RequestError: It is of another type.
        CatalogError: No usable component has that alias.
        MisuseError: The class cannot be constructed.
    """
    interface, value = INTERFACES[kind], requested.value
    reason = f"given to {requested.source}" if requested.in_strategy else "asked for"
    if isinstance(value, str):
        return select_offer(catalog.find(kind, value), catalog, *arguments, reason=reason)
    if isinstance(value, interface):
        return _unlisted(kind, value, catalog, reason)
    if isinstance(value, type) and issubclass(value, interface):
        try:
            instance = value(*arguments)
        except TypeError as error:
            raise _construction_error(f"{kind_label(kind)} {value.__name__}", error) from error
        return _unlisted(kind, instance, catalog, reason)
    cls = value if isinstance(value, type) else type(value)
    advice = counterpart_advice(cls, _EXPORTS.get(kind, "dstrat.plugins"))
    raise RequestError(
        f"{requested.source} is of the type {type(value).__name__}: "
        f"give an alias, a subclass of {interface.__name__} or an instance of one{advice}"
    )


_EXPORTS: dict[Kind, str] = {"strategy": "dstrat.strategies", "accelerator": "dstrat.accelerators"}


def counterpart_advice(cls: type, module: str) -> str:
    """Return how to import the class that replaces another library's, such as Lightning's; empty if there is none.

    Args:
        cls: The other class.
        module: Name of the module of dstrat that exports classes of this kind.
    """
    names = dir(import_module(module))  # of a class, or of one that it is derived from
    counterpart = next((base.__name__ for base in cls.__mro__ if base.__name__ in names), None)
    return f"; pass the one of dstrat: from {module} import {counterpart}" if counterpart else ""


def _unlisted(kind: Kind, instance: Any, catalog: Catalog, reason: str) -> Selection[Any]:
    cls = type(instance)
    # The start method tells apart the aliases of one strategy class.
    settings = {"start_method": getattr(instance, "start_method", None)} if kind == "strategy" else {}
    record = inherited_record(catalog, kind, cls, settings)
    if record is not None:
        record = replace(record, options={**record.options, **settings})
        record = with_class_facts(facts_of_subclass(record, cls), cls)
    facts = _facts(kind, record, instance)
    return Selection(kind=kind, name=cls.__name__, instance=instance, facts=facts, record=record, reason=reason)


def _facts(kind: Kind, record: Component | None, instance: Any) -> Component:
    cls = type(instance)
    if kind == "accelerator":  # of the instance: a class may decide by its arguments
        facts = record or Component(kind=kind, alias="unregistered", target=cls, summary="")
        declared = accelerator_facts(instance)
        differs = any(getattr(facts, name) != fact for name, fact in declared.items())
        return replace(facts, **declared) if differs else facts
    if record is not None:
        return record
    of_class = strategy_facts(cls, instance.start_method) if kind == "strategy" else {}
    return Component(kind=kind, alias="unregistered", target=cls, summary="", **of_class)


def _construction_error(title: str, error: TypeError) -> MisuseError:
    return MisuseError(f"{title} cannot be constructed ({error}): construct it yourself, and give the instance")


# Selection among the offers of the catalog


def select_offer(offer: Offer, catalog: Catalog, *arguments: Any, reason: str = "") -> Selection[Any]:
    """Select an offer of the catalog; its class is imported and constructed.

    Raises:
        CatalogError: A requirement is missing, or its class cannot be used.
        MisuseError: The class cannot be constructed.
    """
    component = offer.component
    catalog.check_requirements(offer)
    cls = catalog.load(offer)
    try:
        instance = cls(*arguments, **component.options)
    except TypeError as error:
        if offer.options and isinstance(error, MisuseError):
            raise MisuseError(f"{offer.title}: {error}") from error
        raise _construction_error(offer.title, error) from error
    record = catalog.facts(offer)
    return Selection(
        kind=component.kind,
        name=component.alias,
        instance=instance,
        facts=_facts(component.kind, record, instance),
        record=record,
        offer=offer,
        reason=reason,
    )


def automatic_offers(kind: Kind, catalog: Catalog) -> list[Offer]:
    """Return the offers that are selected without being requested, the highest rank first."""
    ranked = [(offer.component.auto, offer) for offer in catalog.offers(kind) if offer.component.auto is not None]
    return [offer for _, offer in sorted(ranked, key=lambda entry: -entry[0])]  # equal ranks stay in order of names


def usable(offers: Iterable[Offer], catalog: Catalog) -> Iterator[Selection[Any]]:
    """Yield selections of the offers, in their order, without those that cannot be imported or constructed."""
    for offer in offers:
        try:
            selection = select_offer(offer, catalog)
        except DstratError:  # nobody requested this one; `dstrat doctor` reports it
            continue
        yield selection
