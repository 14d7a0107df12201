"""Choosing the accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, DeviceError
from dstrat.resolve.ability import ability_of
from dstrat.resolve.chosen import Chosen, chosen_as_given
from dstrat.resolve.part import automatic_parts, usable_parts

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.given import Given
    from dstrat.resolve.part import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """What is to run on the accelerator, as far as the user said.

    Attributes:
        strategy: The strategy that was asked for; None where none was.
        device_type: The type of the devices that it was constructed with, such as ``"cuda"``; None without devices.
    """

    strategy: Part[Strategy] | None
    device_type: str | None

    def runs_on(self, part: Part[Any], accelerator: Accelerator) -> bool:
        """Return whether it runs on the accelerator."""
        if self.strategy is not None and not ability_of(self.strategy).runs_on(part):
            return False
        return self.device_type is None or self.device_type == accelerator.get_parallel_devices([0])[0].type


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
        return _best("auto", list(automatic_parts("accelerator", catalog)), load)
    members = _members(given.value, catalog)
    if members:
        return _best(given.value, list(usable_parts(iter(members), catalog)), load)
    chosen: Chosen[Accelerator] = chosen_as_given("accelerator", given, catalog)
    if not chosen.live.is_available():
        others = [part.name for part, _ in _available(automatic_parts("accelerator", catalog))]
        raise DeviceError(f"this machine has no {chosen.part.title}: available are {_listed(others)}")
    return chosen


def _members(name: object, catalog: Catalog) -> list[Offer]:
    """Return what a group stands for, the best first; nothing where the name is no group's."""
    offers = catalog.offers("accelerator")
    if not isinstance(name, str) or any(name in offer.names for offer in offers):
        return []
    members = [offer for offer in offers if name in offer.component.groups]
    return sorted(members, key=lambda offer: float("inf") if offer.component.auto is None else -offer.component.auto)


def _best(asked: str, parts: list[Part[Accelerator]], load: Load) -> Chosen[Accelerator]:
    available = list(_available(iter(parts)))
    if not available:
        members = " or ".join(repr(part.name) for part in parts) or "nothing that is installed and can be loaded"
        raise DeviceError(f"accelerator={asked!r} stands for {members}, and this machine has none")
    for part, accelerator in available:
        if load.runs_on(part, accelerator):
            return Chosen(part=part, reason=_reason(asked, part, [other for other, _ in available]), live=accelerator)
    raise ConflictError(_nothing_fits(asked, [part.name for part, _ in available], load))


def _available(parts: Iterator[Part[Accelerator]]) -> Iterator[tuple[Part[Accelerator], Accelerator]]:
    for part in parts:
        try:
            accelerator = part.construct()
            is_available = accelerator.is_available()
        except Exception:  # noqa: BLE001, S112 - nobody asked for this one, and the others must stay usable
            continue
        if is_available:
            yield part, accelerator


def _reason(asked: str, best: Part[Accelerator], available: list[Part[Accelerator]]) -> str:
    kind = "one" if asked == "auto" else asked
    if len(available) == 1:
        return f"the only {kind} that is available"
    others = ", ".join(part.name for part in available if part is not best)
    if best is available[0]:
        return f"the best {kind} that is available, before {others}"
    return f"the best {kind} that the strategy runs on; {others} would be available too"


def _nothing_fits(asked: str, available: list[str], load: Load) -> str:
    machine = f"accelerator={asked!r} can be {_listed(available)} on this machine"
    if load.strategy is None:
        return f"{machine}, and none of these is of the type {load.device_type!r} of the devices"
    accelerators = ability_of(load.strategy).accelerators
    if load.device_type is not None:
        return f"{machine}, and {load.strategy.title} was given devices of the type {load.device_type!r}"
    return f"{machine}, and {load.strategy.title} runs on {_listed(accelerators)} only: choose another strategy"


def _listed(names: list[str] | tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names) or "none"
