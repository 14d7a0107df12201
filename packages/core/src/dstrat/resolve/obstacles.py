"""Rules that refuse a strategy, each with what to do instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.errors import ClusterError, ConflictError, RequestError
from dstrat.resolve.cluster import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.resolve.ability import Ability, Hardware
    from dstrat.resolve.chosen import Chosen
    from dstrat.resolve.part import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class Situation:
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
class Obstacle:
    """Why a strategy does not fit a situation.

    Attributes:
        problem: What does not go, following the strategy's name.
        cure: What to do.
        error: The type of exception for it.
    """

    problem: str
    cure: str
    error: type[RequestError] = ConflictError


def first_obstacle(ability: Ability, situation: Situation) -> Obstacle | None:
    """Return the first thing that stands in the way; None where nothing does."""
    return next((found for rule in _RULES if (found := rule(ability, situation)) is not None), None)


def _other_accelerator(ability: Ability, situation: Situation) -> Obstacle | None:
    misfit = ability.misfit(situation.hardware)
    if misfit is None:
        return None
    choice = "choose one of these" if ability.accelerators else "choose another accelerator"
    return Obstacle(problem=misfit, cure=f"{choice}, or a strategy for {situation.hardware.name!r}")


def _other_precision(ability: Ability, situation: Situation) -> Obstacle | None:
    if ability.runs_with(situation.precision):
        return None
    name = situation.precision.name
    return Obstacle(
        problem=f"cannot run with precision {name!r}, only with {_listed(ability.precisions)}",
        cure=f"choose one of these, or a strategy for {name!r}",
    )


def _too_many_processes(ability: Ability, situation: Situation) -> Obstacle | None:
    if situation.started <= situation.num_nodes or ability.starts_processes:
        return None
    return Obstacle(
        problem=(
            f"runs in one process on each machine, and {situation.started} were started "
            f"({situation.cluster.part.name}: {situation.cluster.reason})"
        ),
        cure=_cure_of_processes(situation),
        error=ClusterError,
    )


def _cure_of_processes(situation: Situation) -> str:
    if situation.cluster.part.name == LOCAL:
        return "use one strategy and the same devices throughout the script, or choose a strategy for several processes"
    return "start the script once on each machine, or choose a strategy for several processes"


def _too_many_devices(ability: Ability, situation: Situation) -> Obstacle | None:
    if ability.max_devices is None or situation.num_devices <= ability.max_devices:
        return None
    return Obstacle(
        problem=f"uses at most {_counted(ability.max_devices)} on a machine, and not {situation.num_devices}",
        cure=f"ask for devices={ability.max_devices}, or choose a strategy for more",
    )


def _one_device_per_process(ability: Ability, situation: Situation) -> Obstacle | None:
    """Refuse to drive several devices from one process where the hardware cannot."""
    hardware = situation.hardware
    if ability.starts_processes or situation.num_devices == 1 or hardware.devices_share_process:
        return None
    return Obstacle(
        problem=f"drives {situation.num_devices} devices from one process, which accelerator {hardware.name!r} cannot",
        cure="ask for devices=1, or choose a strategy with one process per device",
    )


def _too_many_nodes(ability: Ability, situation: Situation) -> Obstacle | None:
    if situation.num_nodes == 1 or ability.multi_node:
        return None
    return Obstacle(
        problem=f"runs on one machine only, and not on num_nodes={situation.num_nodes}",
        cure="ask for one, or choose a strategy for several",
    )


def _no_script(ability: Ability, situation: Situation) -> Obstacle | None:
    if not situation.interactive or ability.notebook_safe or not situation.needs_starting:
        return None
    return Obstacle(
        problem="starts its processes from a script, and here is none (a notebook, a prompt, python -c)",
        cure="run a script, ask for devices=1, or choose a strategy that works here",
    )


_RULES: tuple[Callable[[Ability, Situation], Obstacle | None], ...] = (
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
