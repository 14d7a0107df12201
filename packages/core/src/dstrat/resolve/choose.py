"""Choice of accelerator, devices, precision and checkpoint io, each with its reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dstrat.errors import (
    BrokenComponentError,
    CatalogError,
    ClusterError,
    ConflictError,
    DeviceError,
    DstratError,
    RequestError,
)
from dstrat.plugins.facts import contradiction
from dstrat.resolve.alternatives import suggest_strategies
from dstrat.resolve.part import (
    Hardware,
    ability_of,
    automatic_parts,
    constructed_strategy,
    part_from,
    part_of_offer,
    usable_parts,
)
from dstrat.resolve.plan import Choice
from dstrat.resolve.request import Requested, written

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.checkpoint_io import CheckpointIO
    from dstrat.interfaces.precision import Precision
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component, Kind
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.part import Part


T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen(Generic[T]):
    """A part, and why it was chosen.

    Attributes:
        part: Where it comes from.
        reason: Why, a few words.
        live: The part itself, ready to be asked.
    """

    part: Part[T]
    reason: str
    live: T

    def choice(self, subject: str, value: str | None = None) -> Choice:
        """Return the plan's line for it."""
        return Choice(subject=subject, value=value or self.part.name, reason=self.reason, owner=self.part.owner)


def chosen_as_given(kind: Kind, given: Requested, catalog: Catalog, *arguments: Any) -> Chosen[Any]:
    """Return the part that the user gave.

    Args:
        kind: What it is.
        given: What the user gave, and where.
        catalog: Where aliases are looked up.
        *arguments: For its constructor, where it is still to be constructed.

    Raises:
        RequestError: It is of another type.
        CatalogError: Nothing usable has that alias.
        MisuseError: It cannot be constructed.
    """
    part: Part[Any] = part_from(kind, given.value, catalog, place=given.place)
    reason = f"given to {given.place}" if given.in_strategy else "asked for"
    return Chosen(part=part, reason=reason, live=part.construct(*arguments))


# Choosing the accelerator.


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is to run on the accelerator, as far as the user said.

    Attributes:
        asked: The strategy that was asked for; None where none was.
        device_type: The type of the devices that it was constructed with, such as ``"cuda"``; None without devices.
    """

    asked: AskedStrategy | None
    device_type: str | None

    def runs_on(self, hardware: Hardware) -> bool:
        """Return whether it runs on the accelerator."""
        return (self.asked is None or self.asked.runs_on(hardware)) and self.has_type_of(hardware)

    def has_type_of(self, hardware: Hardware) -> bool:
        """Return whether the devices, if there are any, are the accelerator's."""
        return self.device_type is None or self.device_type == hardware.device_type


def choose_accelerator(given: Requested | None, catalog: Catalog, load: Load) -> Chosen[Accelerator]:
    """Choose the accelerator.

    Args:
        given: What the user gave; None takes the best that is available.
        catalog: What there is.
        load: What is to run on it; whatever is chosen here without being asked for fits it.

    Raises:
        DeviceError: It is not available, or none is.
        ConflictError: None of those available fits.
        RequestError: It is no accelerator.
        CatalogError: Nothing usable has that alias.
    """
    if given is None:
        return _best("auto", automatic_parts("accelerator", catalog), catalog, load)
    members = _members(given.value, catalog)
    if members:
        return _best(given.value, usable_parts(members, catalog), catalog, load)
    chosen: Chosen[Accelerator] = chosen_as_given("accelerator", given, catalog)
    _check(chosen, catalog, load)
    return chosen


def _members(name: object, catalog: Catalog) -> list[Offer]:
    """Return what a group stands for, the best first; nothing where the name is no group's."""
    offers = catalog.offers("accelerator")
    if not isinstance(name, str) or any(name in offer.names for offer in offers):
        return []
    members = [offer for offer in offers if name in offer.component.groups]
    return sorted(members, key=lambda offer: float("inf") if offer.component.auto is None else -offer.component.auto)


def _check(chosen: Chosen[Accelerator], catalog: Catalog, load: Load) -> None:
    _check_record(chosen.part, chosen.live)
    absence = _absence(chosen.live)
    if absence is not None:
        raise DeviceError(f"{chosen.part.title} {absence}. {_what_is_there(catalog)}")
    if not load.has_type_of(Hardware(part=chosen.part, live=chosen.live)):
        raise ConflictError(
            f"{chosen.part.title} has no devices of the type {load.device_type!r}, "
            "with which the strategy was constructed: leave one of the two out"
        )


def _check_record(part: Part[Accelerator], live: Accelerator) -> None:
    """Refuse an accelerator whose record says of its collectives what the accelerator itself does not."""
    if part.catalog_name and part.record is not None and (difference := contradiction(part.record, live)) is not None:
        raise BrokenComponentError(f"{part.title} cannot be used: its record {difference}")


def _absence(accelerator: Accelerator) -> str | None:
    """Say why the accelerator is not available; None where it is."""
    try:
        is_available = accelerator.is_available()
        hint = None if is_available else accelerator.hint_unavailable()
    except Exception as error:  # noqa: BLE001 - of a plugin, whose driver may be broken, while others can be used
        return f"cannot tell whether it is available ({type(error).__name__}: {error})"
    if is_available:
        return None
    return f"is not available: {hint}" if hint else "is not available"


def _what_is_there(catalog: Catalog) -> str:
    live = [(part.name, part.construct()) for part in automatic_parts("accelerator", catalog)]
    return (
        f"Available on this machine: {_listed([name for name, accelerator in live if _absence(accelerator) is None])}"
    )


def _best(asked: str, parts: Iterator[Part[Accelerator]], catalog: Catalog, load: Load) -> Chosen[Accelerator]:
    candidates = [(part, part.construct()) for part in parts]
    absences = {part.name: absence for part, live in candidates if (absence := _absence(live)) is not None}
    available = [(part, live) for part, live in candidates if part.name not in absences]
    for part, live in available:
        if load.runs_on(Hardware(part=part, live=live)):
            _check_record(part, live)
            return Chosen(part=part, reason=_reason(asked, part, [other for other, _ in available]), live=live)
    if available and load.asked is not None and load.asked.error is not None:
        raise load.asked.error
    if available:
        hardware = [Hardware(part=part, live=live) for part, live in available]
        raise ConflictError(_nothing_fits(asked, hardware, load, catalog))
    members = "; ".join(f"{name!r} {absence}" for name, absence in absences.items()) or "none can be loaded"
    raise DeviceError(f"accelerator={asked!r} finds none: {members}. {_what_is_there(catalog)}")


def _reason(asked: str, best: Part[Accelerator], available: list[Part[Accelerator]]) -> str:
    kind = "one" if asked == "auto" else asked
    if len(available) == 1:
        return f"the only {kind} that is available"
    others = ", ".join(part.name for part in available if part is not best)
    if best is available[0]:
        return f"the best {kind} that is available, before {others}"
    return f"the best {kind} that the strategy runs on; {others} would be available too"


def _nothing_fits(asked: str, available: list[Hardware], load: Load, catalog: Catalog) -> str:
    machine = f"accelerator={asked!r} can be {_listed([hardware.name for hardware in available])} on this machine"
    strategy = load.asked.part if load.asked is not None else None
    if strategy is None or load.device_type is not None:
        return f"{machine}, and the strategy was constructed with devices of the type {load.device_type!r}"
    ability = ability_of(strategy)
    only = f"runs on {_listed(ability.accelerators)} only" if ability.accelerators else None
    why = only or ability.misfit(available[0])
    others = suggest_strategies(
        catalog, lambda other: any(other.runs_on(hardware) for hardware in available), instead_of=strategy
    )
    return f"{machine}, and {strategy.title} {why}: choose another strategy{others}"


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names) or "none"


# Choosing the devices of each machine.


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenDevices:
    """The devices of each machine, and why.

    Attributes:
        indices: For the accelerator; None where the strategy was constructed with devices.
        count: How many on each machine.
        reason: Why, a few words.
    """

    indices: tuple[int, ...] | None
    count: int
    reason: str

    @property
    def choice(self) -> Choice:
        """The plan's line for it."""
        plain = self.indices in (None, tuple(range(self.count)))
        listed = "" if plain else f" ({', '.join(map(str, self.indices or ()))})"
        return Choice(subject="devices", value=f"{self.count}{listed}", reason=self.reason)


def choose_devices(
    given: Requested | None, accelerator: Accelerator, *, started: int, num_nodes: int, strategy: Part[Strategy] | None
) -> ChosenDevices:
    """Choose the devices.

    Args:
        given: What the user gave; None takes as many as there are processes, or else all that there are.
        accelerator: The hardware.
        started: How many processes of the job exist already; 1 where dstrat starts them.
        num_nodes: Number of machines.
        strategy: The strategy that was asked for; None where none was.

    Raises:
        DeviceError: They are not there, or make no sense.
        ClusterError: The processes cannot be spread evenly over the machines.
    """
    if given is not None:
        return _as_given(given, accelerator)
    ability = ability_of(strategy) if strategy is not None else None
    if started > 1 and (ability is None or ability.starts_processes):
        if started % num_nodes:
            raise ClusterError(f"{started} processes were started, which num_nodes={num_nodes} cannot share evenly")
        return _counted(accelerator, started // num_nodes, "one for each process that was started")
    number = accelerator.auto_device_count()
    most = ability.max_devices if ability is not None else None
    if strategy is not None and most is not None and most < number:
        return _counted(accelerator, most, f"the most that {strategy.name} uses")
    return _counted(accelerator, number, "what 'auto' stands for")


def device_type(given: Requested | None) -> str | None:
    """Return the type of the devices that a strategy was constructed with, such as ``"cuda"``.

    Raises:
        DeviceError: They are no devices, or of several types.
    """
    if given is None or not given.in_strategy:
        return None
    types = {str(getattr(device, "type", "")) for device in given.value}
    if len(types) != 1 or "" in types:
        raise DeviceError(f"{given.place} must be torch.devices of one type, and is {given.value!r}")
    return types.pop()


def _as_given(given: Requested, accelerator: Accelerator) -> ChosenDevices:
    if given.in_strategy:
        return ChosenDevices(indices=None, count=len(given.value), reason=f"given to {given.place}")
    value = given.value
    if isinstance(value, bool | float):  # int() would take them
        raise DeviceError(f"{given.place} is of the type {type(value).__name__}: give a number, indices or 'auto'")
    return _parsed(accelerator, value, given.place, "asked for")


def _counted(accelerator: Accelerator, number: int, reason: str) -> ChosenDevices:
    return _parsed(accelerator, number, f"devices='auto', here {number},", reason)


def _parsed(accelerator: Accelerator, devices: Any, place: str, reason: str) -> ChosenDevices:
    try:
        indices = tuple(accelerator.parse_devices(devices))
    except DstratError:
        raise
    except Exception as error:  # a plugin's accelerator that leaves bad words to int()
        raise DeviceError(f"{place} makes no sense to {type(accelerator).__name__}: {error}") from error
    if not indices:
        raise DeviceError(f"{place} names no device: give at least one")
    return ChosenDevices(indices=indices, count=len(indices), reason=reason)


# Choosing the precision, and checking that the hardware computes in its dtypes.


DEFAULT = "32-true"


def choose_precision(given: Requested | None, accelerator: Chosen[Accelerator], catalog: Catalog) -> Chosen[Precision]:
    """Choose the precision.

    Args:
        given: What the user gave; None is ``"32-true"``.
        accelerator: The hardware.
        catalog: What there is.

    Raises:
        ConflictError: The hardware does not compute in one of its dtypes.
        RequestError: It is no precision.
        CatalogError: Nothing usable has that flag.
    """
    chosen = _chosen(given, catalog)
    unsupported = _unsupported(chosen.live, accelerator.live)
    if unsupported is not None:
        others = ", ".join(repr(name) for name in _supported_flags(accelerator.live, catalog))
        raise ConflictError(
            f"precision {chosen.part.name!r} needs {unsupported}, in which {accelerator.part.title} does not compute "
            f"here: choose another one ({others})"
        )
    return chosen


def flag_of(chosen: Chosen[Precision]) -> str:
    """Return the precision's flag, or the name of its class where the user's own has none."""
    return getattr(chosen.live, "flag", chosen.part.name)


def precision_choice(chosen: Chosen[Precision]) -> Choice:
    """Return the plan's line for the precision."""
    flag = flag_of(chosen)
    return chosen.choice("precision", flag if chosen.part.catalog_name else f"{chosen.part.name} ({flag})")


def _chosen(given: Requested | None, catalog: Catalog) -> Chosen[Precision]:
    if given is None:
        default: Part[Precision] = part_of_offer(catalog.find_default("precision", DEFAULT), catalog)
        return Chosen(part=default, reason="the default", live=default.construct())
    value = given.value
    if isinstance(value, bool | float):
        raise RequestError(f"{given.place} is of the type {type(value).__name__}: give a flag such as {DEFAULT!r}")
    if isinstance(value, int):
        given = Requested(value=str(value), place=given.place, in_strategy=given.in_strategy)
    return chosen_as_given("precision", given, catalog)


def _unsupported(precision: Precision, hardware: Accelerator) -> torch.dtype | None:
    dtypes = (precision.param_dtype, precision.compute_dtype, precision.reduce_dtype)
    return next((dtype for dtype in dtypes if not hardware.supports_dtype(dtype)), None)


def _supported_flags(hardware: Accelerator, catalog: Catalog) -> list[str]:
    flags = []
    for part in usable_parts(catalog.offers("precision"), catalog):
        precision: Any = _constructed(part)
        if precision is not None and _unsupported(precision, hardware) is None:
            flags.append(part.name)
    return flags


def _constructed(part: Part[Precision]) -> Precision | None:
    try:
        return part.construct()
    except DstratError:  # nobody asked for this one
        return None


# Choosing how checkpoints reach storage.


def choose_checkpoint_io(given: Requested | None, catalog: Catalog) -> Chosen[CheckpointIO]:
    """Choose the checkpoint io.

    Args:
        given: What the user gave; None takes the best that is installed.
        catalog: What there is.

    Raises:
        RequestError: It is no checkpoint io, or none is installed that may be chosen automatically.
        CatalogError: Nothing usable has that alias.
    """
    if given is not None:
        return chosen_as_given("checkpoint_io", given, catalog)
    for part in automatic_parts("checkpoint_io", catalog):
        return Chosen(part=part, reason="the default", live=part.construct())
    raise RequestError("no checkpoint io is installed that may be chosen automatically: give one as a plugin")


# The strategy that was asked for, and the one that serves its alias on an accelerator.


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedStrategy:
    """The strategy that was asked for; on an accelerator that names another one for its alias, it is that one.

    Attributes:
        names: The alias that was asked for, with its synonyms; empty where an owner was named, or no alias given.
        part: The strategy; None where its alias cannot be used.
        error: Why not.
    """

    names: tuple[str, ...]
    part: Part[Strategy] | None
    error: CatalogError | None = None

    def runs_on(self, hardware: Hardware) -> bool:
        """Return whether it, or what serves its alias there, runs on the hardware."""
        if self.substitute(hardware.part) is not None:
            return True
        return self.part is not None and ability_of(self.part).runs_on(hardware)

    def substitute(self, accelerator: Part[Any]) -> str | None:
        """Return the alias of what serves this one's alias on the accelerator; None where it is used itself."""
        strategies = accelerator.record.strategies if accelerator.record is not None else {}
        return next((strategies[name] for name in self.names if name in strategies), None)

    def on(self, accelerator: Chosen[Any], catalog: Catalog) -> tuple[Part[Strategy], str]:
        """Return the strategy for an accelerator, and why it is that one.

        Raises:
            CatalogError: Its alias, or that of what serves it there, cannot be used.
            ConflictError: It is a class or an instance, and the accelerator names another strategy for its alias.
            MisuseError: It cannot be constructed.
        """
        alias = self.substitute(accelerator.part)
        if alias is None:
            if self.part is None:
                raise self.error or CatalogError(f"strategy {self.names} cannot be used")
            _check_not_served(self.part, accelerator.part)
            return self.part, "asked for"
        reason = f"serves {self.names[0]!r} on accelerator {accelerator.part.name!r}"
        try:
            return constructed_strategy(alias, catalog, place=written("strategy", alias)), reason
        except CatalogError as error:
            raise type(error)(
                f"{accelerator.part.title} lets {alias!r} serve {self.names[0]!r}, and {error}"
            ) from error


def asked_strategy(value: object, catalog: Catalog) -> AskedStrategy | None:
    """Return the strategy that a user means; None lets dstrat choose.

    Raises:
        RequestError: It is of another type.
        CatalogError: Nothing usable has that alias, and no accelerator names another strategy for it.
        MisuseError: It cannot be constructed.
    """
    if isinstance(value, str) and value == "auto":
        return None
    names = _names(value, catalog)
    try:
        part = constructed_strategy(value, catalog, place=written("strategy", value))
    except CatalogError as error:
        if not _is_served(names, catalog):
            raise
        return AskedStrategy(names=names, part=None, error=error)
    return AskedStrategy(names=names, part=part)


def _check_not_served(part: Part[Strategy], accelerator: Part[Any]) -> None:
    """Refuse the class of an alias that another strategy serves on the accelerator, where it would not work.

    Naming the owner of an alias insists on its strategy.
    """
    if part.catalog_name:
        return
    served = accelerator.record.strategies.get(part.alias) if accelerator.record is not None else None
    if served is not None:
        raise ConflictError(
            f"{part.title} cannot run on {accelerator.title}, where {served!r} serves {part.alias!r}: "
            f"give strategy={served!r}, or an instance of its class"
        )


def _names(value: object, catalog: Catalog) -> tuple[str, ...]:
    """Return the alias that a user wrote, then everything that the same strategy is called."""
    if not isinstance(value, str) or "@" in value:
        return ()
    offered = {name for offer in catalog.offers("strategy") if value in offer.names for name in offer.names}
    return (value, *sorted(offered - {value}))


def _is_served(names: tuple[str, ...], catalog: Catalog) -> bool:
    records: list[Component] = [offer.component for offer in catalog.offers("accelerator")]
    return any(name in record.strategies for record in records for name in names)
