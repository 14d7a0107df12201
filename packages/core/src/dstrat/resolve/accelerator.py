"""Choosing the accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.errors import BrokenComponentError, ConflictError, DeviceError
from dstrat.plugins.facts import contradiction
from dstrat.resolve.ability import Hardware, ability_of
from dstrat.resolve.alternatives import suggest_strategies
from dstrat.resolve.chosen import Chosen, chosen_as_given
from dstrat.resolve.part import automatic_parts, usable_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.asked import AskedStrategy
    from dstrat.resolve.given import Given
    from dstrat.resolve.part import Part


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


def choose_accelerator(given: Given | None, catalog: Catalog, load: Load) -> Chosen[Accelerator]:
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
