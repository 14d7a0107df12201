"""Strategy, accelerator or plugin to run: from the catalog, a class, or a user's instance."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dstrat.errors import DstratError, MisuseError, RequestError
from dstrat.interfaces.accelerator import Accelerator
from dstrat.interfaces.checkpoint_io import CheckpointIO
from dstrat.interfaces.cluster import ClusterEnvironment
from dstrat.interfaces.precision import Precision
from dstrat.interfaces.strategy import Strategy
from dstrat.plugins.component import NO_BACKEND
from dstrat.plugins.facts import accelerator_facts, declares_all, facts_of_subclass, strategy_facts, with_class_facts
from dstrat.plugins.offer import kind_label
from dstrat.plugins.registry import inherited_record, is_target

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


# Abilities of a strategy and of the hardware: by their records or, where these say nothing, by their classes.


@dataclass(frozen=True, kw_only=True)  # without slots, which the cached device type needs
class Hardware:
    """An accelerator with what strategies require of it.

    Attributes:
        part: Where it comes from.
        live: The accelerator itself.
    """

    part: Part[Accelerator]
    live: Accelerator

    @property
    def name(self) -> str:
        """Its alias, or the name of the user's class."""
        return self.part.name

    @property
    def names(self) -> frozenset[str]:
        """Everything by which a strategy may mean it: aliases and groups; empty where nothing is known of it."""
        return self.part.names

    @cached_property
    def device_type(self) -> str:
        """The type of its torch devices."""
        record = self.part.record
        if self.part.catalog_name and record is not None and record.device_type is not None:
            return record.device_type
        return self.live.get_parallel_devices([0])[0].type

    @property
    def collectives(self) -> str:
        """The backend of its collectives; ``"none"`` where it has none."""
        return str(accelerator_facts(self.live)["process_group_backend"] or NO_BACKEND)

    @property
    def supports_torch_distributed(self) -> bool:
        """Whether torch.distributed can use the backend of its collectives."""
        return accelerator_facts(self.live)["supports_torch_distributed"] is True

    @property
    def devices_share_process(self) -> bool:
        """Whether one process can drive several of its devices."""
        return accelerator_facts(self.live)["devices_share_process"] is True


@dataclass(frozen=True, kw_only=True, slots=True)
class Ability:
    """What a strategy can do, and what it requires.

    Attributes:
        accelerators: The accelerators or groups that it is written for; empty means any.
        device_types: The types of devices that it can use; empty means any.
        precisions: The precisions that it runs; empty means any.
        uses_torch_distributed: Whether it needs an accelerator that torch.distributed supports.
        starts_processes: Whether it runs one process per device.
        notebook_safe: Whether it starts them from an interactive session.
        max_devices: The most devices that it uses on one machine; None is no limit.
        multi_node: Whether it runs on more than one machine.
    """

    accelerators: tuple[str, ...] = ()
    device_types: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    uses_torch_distributed: bool
    starts_processes: bool
    notebook_safe: bool
    max_devices: int | None = None
    multi_node: bool

    def runs_on(self, hardware: Hardware) -> bool:
        """Return whether it runs on the hardware."""
        return self.misfit(hardware) is None

    def misfit(self, hardware: Hardware) -> str | None:
        """Say why it does not run on the hardware, following the strategy's name; None where it does."""
        # A strategy that is written for some accelerators runs on one that nobody describes.
        if self.accelerators and hardware.names and not hardware.names & {*self.accelerators}:
            return f"cannot run on accelerator {hardware.name!r}, only on {_listed(self.accelerators)}"
        if self.uses_torch_distributed and not hardware.supports_torch_distributed:
            return (
                f"communicates through torch.distributed, which does not support accelerator {hardware.name!r} "
                f"(its collectives: {hardware.collectives})"
            )
        if self.device_types and hardware.device_type not in self.device_types:
            return (
                f"uses devices of the type {_listed(self.device_types, 'or')}, and those of accelerator "
                f"{hardware.name!r} are of the type {hardware.device_type!r}"
            )
        return None

    def runs_with(self, precision: Part[Any]) -> bool:
        """Return whether it runs with the precision; every strategy does with one that nobody describes."""
        return not self.precisions or not precision.names or bool(precision.names & {*self.precisions})

    def can_use(self, num_devices: int) -> bool:
        """Return whether it uses so many devices on one machine."""
        return self.starts_processes or self.max_devices is None or num_devices <= self.max_devices


def ability_of(part: Part[Strategy]) -> Ability:
    """Return what the strategy can do."""
    if part.record is not None:
        return _ability(part.record)
    facts = strategy_facts(part.cls, start_method_of(part))
    drives_several = facts.pop("drives_several_devices")
    return Ability(**facts, max_devices=None if facts["starts_processes"] or drives_several else 1)


def ability_of_offer(offer: Offer, catalog: Catalog) -> Ability:
    """Return what an offered strategy can do; its class is imported where its record does not say.

    Raises:
        CatalogError: The class is needed, and cannot be used.
    """
    record = offer.component
    return _ability(record if declares_all(record) else with_class_facts(record, catalog.load(offer)))


def _ability(record: Component) -> Ability:
    """Return what a record that declares all facts says of its strategy."""
    is_limited = not record.starts_processes and not record.drives_several_devices
    return Ability(
        accelerators=record.accelerators,
        device_types=record.device_types,
        precisions=record.precisions,
        uses_torch_distributed=record.uses_torch_distributed is True,
        starts_processes=record.starts_processes is True,
        notebook_safe=record.notebook_safe is not False,
        max_devices=1 if is_limited else record.max_devices,
        multi_node=record.multi_node is True,
    )


def start_method_of(part: Part[Strategy]) -> str | None:
    """Return how the strategy starts processes where it has to; None where it starts none."""
    return part.construct().start_method


def _listed(names: tuple[str, ...], joint: str = "") -> str:
    quoted = [repr(name) for name in names]
    if joint and len(quoted) > 1:
        return f"{', '.join(quoted[:-1])} {joint} {quoted[-1]}"
    return ", ".join(quoted)
