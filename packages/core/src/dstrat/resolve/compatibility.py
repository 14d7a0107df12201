"""Choice of the strategy, and what keeps a strategy from running."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.errors import ClusterError, ConflictError, DstratError, RequestError
from dstrat.plugins.known import FOR_SEVERAL_DEVICES, known_requirement, pip_command
from dstrat.resolve.alternatives import suggest_strategies
from dstrat.resolve.cluster import LOCAL, check_cluster
from dstrat.resolve.part import ability_of, ability_of_offer, automatic_offers, part_of_offer, usable_parts
from dstrat.resolve.plan import Choice

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.choose import Chosen
    from dstrat.resolve.part import Ability, Hardware, Part


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
    asked: Part[Strategy] | None, reason: str, catalog: Catalog, situation: Constraints
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


def _check_processes(obstacle: Incompatibility, situation: Constraints) -> None:
    """Raise the error of an environment that contradicts itself first: then the processes may not even be there."""
    if obstacle.error is ClusterError:
        per_node = situation.started // situation.num_nodes
        check_cluster(situation.cluster, processes_per_node=per_node, num_nodes=situation.num_nodes)


def _automatic(catalog: Catalog, situation: Constraints) -> ChosenStrategy:
    offers = automatic_offers("strategy", catalog)
    candidates: list[tuple[Offer, Incompatibility | None]] = []
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


def _is_candidate(ability: Ability, situation: Constraints) -> bool:
    """Return whether a strategy is one for so many devices and processes."""
    if not situation.needs_processes:
        return not ability.starts_processes
    drives_several = ability.max_devices != 1 and ability.runs_on(situation.hardware)
    return ability.starts_processes or drives_several


def _fits(ability: Ability, situation: Constraints) -> bool:
    return _is_candidate(ability, situation) and first_obstacle(ability, situation) is None


def _nothing_installed(situation: Constraints) -> str:
    if not situation.needs_processes:
        return "no strategy for one device is installed that may be chosen automatically: give one as strategy="
    hint = pip_command(known_requirement("strategy", FOR_SEVERAL_DEVICES) or "")
    fewer = "start the script once" if situation.started > 1 else "ask for devices=1"
    return (
        f"{_need(situation)} need a strategy that runs one process per device, and none is installed: "
        f"{hint}, or {fewer}"
    )


def _need(situation: Constraints) -> str:
    if situation.started > 1:
        return f"{situation.started} processes"
    devices = f"{situation.num_devices} device{'s' if situation.num_devices > 1 else ''}"
    return devices if situation.num_nodes == 1 else f"{devices} on each of {situation.num_nodes} machines"


# Rules that refuse a strategy, each with what to do instead.


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """Everything that a strategy has to fit.

    Attributes:
        hardware: The accelerator with what it supports.
        precision: The dtypes.
        num_devices: Devices of each machine.
        num_nodes: Machines.
        cluster: Where the job runs.
        started: How many processes of the job exist already; 1 where dstrat starts them.
        interactive: Whether this is a notebook or a prompt.
        test_runner: What runs the test that this is, such as ``"pytest"``; None outside of tests.
    """

    hardware: Hardware
    precision: Part[Any]
    num_devices: int
    num_nodes: int
    cluster: Chosen[ClusterEnvironment]
    started: int
    interactive: bool
    test_runner: str | None = None

    @property
    def needs_processes(self) -> bool:
        """Whether more than one process takes part when each has one device."""
        return self.num_devices * self.num_nodes > 1 or self.started > 1

    @property
    def needs_starting(self) -> bool:
        """Whether dstrat has to start processes when each has one device."""
        return self.needs_processes and not self.cluster.live.creates_processes_externally


@dataclass(frozen=True, kw_only=True, slots=True)
class Incompatibility:
    """Why a strategy does not fit a situation.

    Attributes:
        problem: What does not go, following the strategy's name.
        cure: What to do.
        error: The type of exception for it.
    """

    problem: str
    cure: str
    error: type[RequestError] = ConflictError


def first_obstacle(ability: Ability, situation: Constraints) -> Incompatibility | None:
    """Return the first thing that stands in the way; None where nothing does."""
    return next((found for rule in _RULES if (found := rule(ability, situation)) is not None), None)


def _other_accelerator(ability: Ability, situation: Constraints) -> Incompatibility | None:
    misfit = ability.misfit(situation.hardware)
    if misfit is None:
        return None
    choice = "choose one of these" if ability.accelerators else "choose another accelerator"
    return Incompatibility(problem=misfit, cure=f"{choice}, or a strategy for {situation.hardware.name!r}")


def _other_precision(ability: Ability, situation: Constraints) -> Incompatibility | None:
    if ability.runs_with(situation.precision):
        return None
    name = situation.precision.name
    return Incompatibility(
        problem=f"cannot run with precision {name!r}, only with {_listed(ability.precisions)}",
        cure=f"choose one of these, or a strategy for {name!r}",
    )


def _too_many_processes(ability: Ability, situation: Constraints) -> Incompatibility | None:
    if situation.started <= situation.num_nodes or ability.starts_processes:
        return None
    return Incompatibility(
        problem=(
            f"runs in one process on each machine, and {situation.started} were started "
            f"({situation.cluster.part.name}: {situation.cluster.reason})"
        ),
        cure=_cure_of_processes(situation),
        error=ClusterError,
    )


def _cure_of_processes(situation: Constraints) -> str:
    if situation.cluster.part.name == LOCAL:
        return "use one strategy and the same devices throughout the script, or choose a strategy for several processes"
    return "start the script once on each machine, or choose a strategy for several processes"


def _too_many_devices(ability: Ability, situation: Constraints) -> Incompatibility | None:
    if ability.max_devices is None or situation.num_devices <= ability.max_devices:
        return None
    return Incompatibility(
        problem=f"uses at most {_counted(ability.max_devices)} on a machine, and not {situation.num_devices}",
        cure=f"ask for devices={ability.max_devices}, or choose a strategy for more",
    )


def _one_device_per_process(ability: Ability, situation: Constraints) -> Incompatibility | None:
    """Refuse to drive several devices from one process where the hardware cannot."""
    hardware = situation.hardware
    if ability.starts_processes or situation.num_devices == 1 or hardware.devices_share_process:
        return None
    return Incompatibility(
        problem=f"drives {situation.num_devices} devices from one process, which accelerator {hardware.name!r} cannot",
        cure="ask for devices=1, or choose a strategy with one process per device",
    )


def _too_many_nodes(ability: Ability, situation: Constraints) -> Incompatibility | None:
    if situation.num_nodes == 1 or ability.multi_node:
        return None
    return Incompatibility(
        problem=f"runs on one machine only, and not on num_nodes={situation.num_nodes}",
        cure="ask for one, or choose a strategy for several",
    )


def _no_script(ability: Ability, situation: Constraints) -> Incompatibility | None:
    if not situation.interactive or ability.notebook_safe or not situation.needs_starting:
        return None
    return Incompatibility(
        problem="starts its processes from a script, and here is none (a notebook, a prompt, python -c)",
        cure="run a script, ask for devices=1, or choose a strategy that works here",
    )


_RULES: tuple[Callable[[Ability, Constraints], Incompatibility | None], ...] = (
    _other_accelerator,
    _too_many_processes,
    _too_many_devices,
    _one_device_per_process,
    _too_many_nodes,
    _other_precision,
    _no_script,
)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(repr(name) for name in names)


def _counted(devices: int) -> str:
    return f"{devices} device" if devices == 1 else f"{devices} devices"
