"""Choosing the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.errors import ClusterError, ConflictError, DstratError
from dstrat.plugins.known import FOR_SEVERAL_DEVICES, known_requirement, pip_command
from dstrat.resolve.ability import ability_of, ability_of_offer
from dstrat.resolve.choice import Choice
from dstrat.resolve.cluster import check_cluster
from dstrat.resolve.obstacles import first_obstacle
from dstrat.resolve.part import automatic_offers, part_of_offer, usable_parts

if TYPE_CHECKING:
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.ability import Ability
    from dstrat.resolve.obstacles import Obstacle, Situation
    from dstrat.resolve.part import Part

_MOST_ALIASES = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenStrategy:
    """The strategy, which is not constructed yet, and why it was chosen.

    Attributes:
        part: Where it comes from.
        reason: Why, a few words.
    """

    part: Part[Strategy]
    reason: str

    @property
    def choice(self) -> Choice:
        """The plan's line for it."""
        return Choice(subject="strategy", value=self.part.name, reason=self.reason, owner=self.part.owner)


def choose_strategy(
    asked: Part[Strategy] | None, reason: str, catalog: Catalog, situation: Situation
) -> ChosenStrategy:
    """Choose the strategy.

    Args:
        asked: The strategy that the user gave, or that serves its alias here; None takes the best that fits.
        reason: Why it is that one.
        catalog: What there is.
        situation: What it has to fit.

    Raises:
        ConflictError: It does not fit, or none does.
        ClusterError: It does not fit the processes that were started.
    """
    if asked is None:
        return _automatic(catalog, situation)
    found = first_obstacle(ability_of(asked), situation)
    if found is not None:
        _check_processes(found, situation)
        others = _alternatives(catalog, situation, package=_package(asked))
        raise found.error(f"{asked.title} {found.problem}: {found.cure}{others}")
    return ChosenStrategy(part=asked, reason=reason)


def _check_processes(found: Obstacle, situation: Situation) -> None:
    """Let an environment that contradicts itself speak first: then the processes may not even be there."""
    if found.error is ClusterError:
        per_node = situation.started // situation.num_nodes
        check_cluster(situation.cluster, processes_per_node=per_node, num_nodes=situation.num_nodes)


def _automatic(catalog: Catalog, situation: Situation) -> ChosenStrategy:
    offers = automatic_offers("strategy", catalog)
    candidates: list[tuple[Offer, Obstacle | None]] = []
    for offer in offers:
        try:
            ability = ability_of_offer(offer, catalog)
        except DstratError:  # its class, which has to be asked for a fact, cannot be loaded
            if offer.component.starts_processes is situation.needs_processes:
                candidates.append((offer, None))  # where nothing else fits, it says why
            continue
        if _is_candidate(ability, situation):
            candidates.append((offer, first_obstacle(ability, situation)))
    fitting = [offer for offer, obstacle in candidates if obstacle is None]
    if fitting:
        # Where none can be loaded, the best of them says why.
        part = next(usable_parts(fitting, catalog), None) or part_of_offer(fitting[0], catalog)
        return ChosenStrategy(part=part, reason=f"the first choice for {_need(situation)}")
    for offer, found in candidates:
        if found is not None:
            raise found.error(
                f"no strategy that is chosen automatically fits: {offer.title} {found.problem}: {found.cure}"
                f"{_alternatives(catalog, situation)}"
            )
    raise ConflictError(_nothing_installed(situation))


def _is_candidate(ability: Ability, situation: Situation) -> bool:
    """Return whether a strategy is one for so many devices and processes."""
    if not situation.needs_processes:
        return not ability.starts_processes
    drives_several = ability.max_devices != 1 and ability.runs_on(situation.hardware)
    return ability.starts_processes or drives_several


def _nothing_installed(situation: Situation) -> str:
    if not situation.needs_processes:
        return "no strategy for one device is installed that may be chosen automatically: give one as strategy="
    hint = pip_command(known_requirement("strategy", FOR_SEVERAL_DEVICES) or "")
    fewer = "start the script once" if situation.started > 1 else "ask for devices=1"
    return (
        f"{_need(situation)} need a strategy that runs one process per device, and none is installed: "
        f"{hint}, or {fewer}"
    )


def _need(situation: Situation) -> str:
    if situation.started > 1:
        return f"{situation.started} processes"
    devices = f"{situation.num_devices} device{'s' if situation.num_devices > 1 else ''}"
    return devices if situation.num_nodes == 1 else f"{devices} on each of {situation.num_nodes} machines"


def _package(part: Part[Strategy]) -> str:
    """Return the Python package of a strategy."""
    home = part.cls.__module__ if part.record is None else part.record.target_name
    return home.partition(".")[0].partition(":")[0]


def _alternatives(catalog: Catalog, situation: Situation, *, package: str | None = None) -> str:
    """List the aliases that fit: those of a package first, then automatic choices and those that require little."""
    fitting = [offer.component for offer in catalog.offers("strategy") if _fits(offer, catalog, situation)]
    fitting.sort(key=lambda c: (not c.target_name.startswith(f"{package}."), c.auto is None, len(c.requires)))
    plain = [component for component in fitting if not any(_extends(component, other) for other in fitting)]
    named = ", ".join(repr(component.alias) for component in plain[:_MOST_ALIASES])
    return f" ({named})" if named else ""


def _extends(component: Component, other: Component) -> bool:
    """Return whether the component is the other one with further options."""
    options = component.options
    presets_all = all(key in options and options[key] is value for key, value in other.options.items())
    return component.target == other.target and len(options) > len(other.options) and presets_all


def _fits(offer: Offer, catalog: Catalog, situation: Situation) -> bool:
    try:
        ability = ability_of_offer(offer, catalog)
        if not _is_candidate(ability, situation) or first_obstacle(ability, situation) is not None:
            return False
        return not catalog.missing_requirements(offer)
    except DstratError:  # its author wrote a requirement that is none
        return False
