"""Choosing the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.errors import ClusterError, ConflictError, DstratError
from dstrat.plugins.known import FOR_SEVERAL_DEVICES, known_requirement, pip_command
from dstrat.resolve.ability import ability_of, ability_of_offer
from dstrat.resolve.alternatives import suggest_strategies
from dstrat.resolve.choice import Choice
from dstrat.resolve.cluster import check_cluster
from dstrat.resolve.obstacles import first_obstacle
from dstrat.resolve.part import automatic_offers, part_of_offer, usable_parts

if TYPE_CHECKING:
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.ability import Ability
    from dstrat.resolve.obstacles import Obstacle, Situation
    from dstrat.resolve.part import Part


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
    obstacle = first_obstacle(ability_of(asked), situation)
    if obstacle is not None:
        _check_processes(obstacle, situation)
        others = suggest_strategies(catalog, lambda ability: _fits(ability, situation), instead_of=asked)
        raise obstacle.error(f"{asked.title} {obstacle.problem}: {obstacle.cure}{others}")
    return ChosenStrategy(part=asked, reason=reason)


def _check_processes(obstacle: Obstacle, situation: Situation) -> None:
    """Raise the error of an environment that contradicts itself first: then the processes may not even be there."""
    if obstacle.error is ClusterError:
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
    for offer, obstacle in candidates:
        if obstacle is not None:
            others = suggest_strategies(catalog, lambda ability: _fits(ability, situation))
            raise obstacle.error(
                f"no strategy that is chosen automatically fits: {offer.title} {obstacle.problem}: {obstacle.cure}"
                f"{others}"
            )
    raise ConflictError(_nothing_installed(situation))


def _is_candidate(ability: Ability, situation: Situation) -> bool:
    """Return whether a strategy is one for so many devices and processes."""
    if not situation.needs_processes:
        return not ability.starts_processes
    drives_several = ability.max_devices != 1 and ability.runs_on(situation.hardware)
    return ability.starts_processes or drives_several


def _fits(ability: Ability, situation: Situation) -> bool:
    return _is_candidate(ability, situation) and first_obstacle(ability, situation) is None


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
