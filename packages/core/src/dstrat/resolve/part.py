"""One part of what will run, wherever it comes from: the catalog, a class or an instance of the user's."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dstrat.errors import DstratError, MisuseError, RequestError
from dstrat.interfaces.accelerator import Accelerator
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.interfaces.cluster import ClusterEnvironment
from dstrat.interfaces.precision import Precision
from dstrat.interfaces.strategy import Strategy
from dstrat.plugins.facts import facts_of_subclass, with_class_facts
from dstrat.plugins.inheritance import inherited_record, is_target
from dstrat.plugins.offer import kind_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component, Kind
    from dstrat.plugins.offer import Offer

T = TypeVar("T")

INTERFACES: dict[Kind, type[Any]] = {
    "strategy": Strategy,
    "accelerator": Accelerator,
    "precision": Precision,
    "checkpoint_io": CheckpointIO,
    "cluster_environment": ClusterEnvironment,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Part(Generic[T]):
    """One part of what will run.

    Attributes:
        kind: What it is.
        name: Its alias, or the name of its class where the user gave a class or an instance.
        cls: Its class.
        record: The facts about it; those of its nearest base for a class of the user's own, None where nothing is
            known.
        catalog_name: Its full alias; empty where the user gave a class or an instance.
        owner: The distribution that brings it; empty where the user gave a class or an instance.
        instance: What the user constructed, or what was constructed to be asked; None where nothing is yet.
        options: Constructor arguments that its alias presets.
    """

    kind: Kind
    name: str
    cls: type[T]
    record: Component | None = None
    catalog_name: str = ""
    owner: str = ""
    instance: T | None = None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def title(self) -> str:
        """The part as error messages name it."""
        if self.catalog_name:
            return f"{kind_label(self.kind)} {self.name!r} from {self.owner}"
        return f"{kind_label(self.kind)} {self.name}"

    @property
    def alias(self) -> str:
        """Its alias, also where the user gave its class or an instance; the name of a class that has none."""
        record = self.record
        return record.alias if record is not None and is_target(record.target, self.cls) else self.name

    @property
    def names(self) -> frozenset[str]:
        """Everything by which facts of others may mean it: aliases and groups; empty where nothing is known of it."""
        record = self.record
        return frozenset({record.alias, *record.synonyms, *record.groups}) if record else frozenset()

    def construct(self, *arguments: Any) -> T:
        """Return the user's instance, or a new one.

        Raises:
            MisuseError: The class cannot be constructed with these arguments and the alias's options.
        """
        if self.instance is not None:
            return self.instance
        try:
            return self.cls(*arguments, **self.options)
        except TypeError as error:
            raise MisuseError(
                f"{self.title} cannot be constructed ({error}): construct it yourself, and give the instance"
            ) from error


def constructed_strategy(value: object, catalog: Catalog, *, place: str) -> Part[Strategy]:
    """Return the strategy that a user means, constructed: only then it tells with what parts, and how it starts.

    Raises:
        RequestError: It is of another type.
        CatalogError: Nothing usable has that alias.
        MisuseError: It cannot be constructed.
    """
    part: Part[Strategy] = part_from("strategy", value, catalog, place=place)
    if isinstance(value, type):
        return _own("strategy", value, catalog, instance=part.construct())
    return replace(part, instance=part.construct())


def part_from(kind: Kind, value: object, catalog: Catalog, *, place: str) -> Part[Any]:
    """Return the part that a user means by an alias, a class or an instance.

    Args:
        kind: What it is to be.
        value: What the user wrote.
        catalog: Where aliases are looked up.
        place: Where the user wrote it, for error messages.

    Raises:
        RequestError: It is of another type.
        CatalogError: Nothing usable has that alias.
    """
    interface = INTERFACES[kind]
    if isinstance(value, str):
        return part_of_offer(catalog.find(kind, value), catalog)
    if isinstance(value, interface):
        return _own(kind, type(value), catalog, instance=value)
    if isinstance(value, type) and issubclass(value, interface):
        return _own(kind, value, catalog)
    raise RequestError(
        f"{place} is of the type {type(value).__name__}: "
        f"give an alias, a subclass of {interface.__name__} or an instance of one"
    )


def part_of_offer(offer: Offer, catalog: Catalog) -> Part[Any]:
    """Return the part behind an alias; its class is imported.

    Raises:
        CatalogError: Something that it requires is missing, or its class cannot be used.
    """
    catalog.check_requirements(offer)
    cls = catalog.load(offer)
    return Part(
        kind=offer.component.kind,
        name=offer.component.alias,
        cls=cls,
        record=with_class_facts(offer.component, cls),
        catalog_name=offer.full_alias,
        owner=offer.owner_label,
        options=offer.component.options,
    )


def automatic_offers(kind: Kind, catalog: Catalog) -> list[Offer]:
    """Return what may be chosen without being asked for, the best first."""
    ranked = [(offer.component.auto, offer) for offer in catalog.offers(kind) if offer.component.auto is not None]
    return [offer for _, offer in sorted(ranked, key=lambda entry: -entry[0])]  # equal ranks stay in order of names


def automatic_parts(kind: Kind, catalog: Catalog) -> Iterator[Part[Any]]:
    """Yield what may be chosen without being asked for, the best first; what cannot be loaded is passed over."""
    return usable_parts(automatic_offers(kind, catalog), catalog)


def usable_parts(offers: Iterable[Offer], catalog: Catalog) -> Iterator[Part[Any]]:
    """Yield the parts that can be loaded, in the order given."""
    for offer in offers:
        try:
            part = part_of_offer(offer, catalog)
        except DstratError:  # nobody asked for this one; `dstrat doctor` tells of it
            continue
        yield part


def _own(kind: Kind, cls: type[Any], catalog: Catalog, instance: Any = None) -> Part[Any]:
    # The start method tells apart the aliases of one strategy class.
    settings = {} if instance is None else {"start_method": getattr(instance, "start_method", None)}
    record = inherited_record(catalog, kind, cls, settings)
    if record is not None:
        record = dataclasses.replace(record, options={**record.options, **settings})
        record = with_class_facts(facts_of_subclass(record, cls), cls)
    return Part(
        kind=kind,
        name=cls.__name__,
        cls=cls,
        record=record,
        instance=instance,
    )
