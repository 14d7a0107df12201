"""Compatibility of a strategy with accelerator, devices, machines, precision and processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.errors import ClusterError, ConflictError, RequestError
from dstrat.plugins.component import NO_BACKEND
from dstrat.resolve.cluster import LOCAL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.cluster import ClusterEnvironment
    from dstrat.interfaces.precision import Precision
    from dstrat.plugins.component import Component
    from dstrat.resolve.selection import Selection


def max_devices(facts: Component) -> int | None:
    """Return the most devices that a strategy uses on one machine; None is no limit."""
    if not facts.starts_processes and not facts.drives_several_devices:
        return 1
    return facts.max_devices


# Compatibility with an accelerator, which is known before everything else


def device_type_of(accelerator: Selection[Accelerator]) -> str:
    """Return the type of an accelerator's torch devices, such as ``"cuda"``."""
    record = accelerator.record
    if accelerator.from_catalog and record is not None and record.device_type is not None:
        return record.device_type
    return accelerator.instance.get_parallel_devices([0])[0].type


def accelerator_problem(facts: Component, accelerator: Selection[Accelerator]) -> str | None:
    """Say why a strategy does not run on an accelerator, following the strategy's name; None where it does."""
    # A strategy that is written for some accelerators runs on one without a record.
    if facts.accelerators and accelerator.names and not accelerator.names & {*facts.accelerators}:
        return f"cannot run on accelerator {accelerator.name!r}, only on {listed(facts.accelerators)}"
    declared = accelerator.facts
    if facts.uses_torch_distributed and not declared.supports_torch_distributed:
        return (
            f"communicates through torch.distributed, which does not support accelerator {accelerator.name!r} "
            f"(its collectives: {declared.process_group_backend or NO_BACKEND})"
        )
    if facts.device_types and device_type_of(accelerator) not in facts.device_types:
        return (
            f"uses devices of the type {listed(facts.device_types, 'or')}, and those of accelerator "
            f"{accelerator.name!r} are of the type {device_type_of(accelerator)!r}"
        )
    return None


# Rules that refuse a strategy, each with a hint


@dataclass(frozen=True, kw_only=True, slots=True)
class Constraints:
    """Everything that a strategy has to fit.

    Attributes:
        accelerator: The hardware.
        precision: The dtypes.
        num_devices: Devices of each machine.
        num_nodes: Machines.
        cluster: The cluster environment.
        num_started: How many processes of the job exist already; 1 where dstrat starts them.
        interactive: Whether this is a notebook, a prompt, or the worker of another program.
        test_runner: The runner of the calling test, such as ``"pytest"``; None outside of tests.
    """

    accelerator: Selection[Accelerator]
    precision: Selection[Precision]
    num_devices: int
    num_nodes: int
    cluster: Selection[ClusterEnvironment]
    num_started: int
    interactive: bool
    test_runner: str | None = None

    @property
    def needs_processes(self) -> bool:
        """Whether more than one process takes part when each has one device."""
        return self.num_devices * self.num_nodes > 1 or self.num_started > 1

    @property
    def needs_starting(self) -> bool:
        """Whether dstrat has to start processes when each has one device."""
        return self.needs_processes and not self.cluster.instance.creates_processes_externally


@dataclass(frozen=True, kw_only=True, slots=True)
class Incompatibility:
    """Why a strategy does not fit the constraints.

    Attributes:
        problem: The reason, following the strategy's name.
        hint: A remedy, such as another option.
        error: The type of exception for it.
    """

    problem: str
    hint: str
    error: type[RequestError] = ConflictError


def incompatibility(facts: Component, constraints: Constraints) -> Incompatibility | None:
    """Return the first reason against a strategy; None where there is none."""
    return next((reason for rule in _RULES if (reason := rule(facts, constraints)) is not None), None)


def _other_accelerator(facts: Component, constraints: Constraints) -> Incompatibility | None:
    problem = accelerator_problem(facts, constraints.accelerator)
    if problem is None:
        return None
    hint = "choose one of these" if facts.accelerators else "choose another accelerator"
    return Incompatibility(problem=problem, hint=f"{hint}, or a strategy for {constraints.accelerator.name!r}")


def _other_precision(facts: Component, constraints: Constraints) -> Incompatibility | None:
    name, names = constraints.precision.name, constraints.precision.names
    # A strategy that is written for some precisions runs with one without a record.
    if not facts.precisions or not names or names & {*facts.precisions}:
        return None
    return Incompatibility(
        problem=f"cannot run with precision {name!r}, only with {listed(facts.precisions)}",
        hint=f"choose one of these, or a strategy for {name!r}",
    )


def _too_many_processes(facts: Component, constraints: Constraints) -> Incompatibility | None:
    if constraints.num_started <= constraints.num_nodes or facts.starts_processes:
        return None
    if constraints.cluster.name == LOCAL:  # another Trainer of this script has started them
        hint = "use one strategy and the same devices throughout the script"
    else:
        hint = "start the script once on each machine"
    return Incompatibility(
        problem=(
            f"runs in one process on each machine, and {constraints.num_started} were started "
            f"({constraints.cluster.name}: {constraints.cluster.reason})"
        ),
        hint=f"{hint}, or choose a strategy for several processes",
        error=ClusterError,
    )


def _too_many_devices(facts: Component, constraints: Constraints) -> Incompatibility | None:
    limit, number = max_devices(facts), constraints.num_devices
    if limit is None or number <= limit:
        return None
    return Incompatibility(
        problem=f"uses at most {limit} device{'s' if limit > 1 else ''} on a machine, and not {number}",
        hint=f"ask for devices={limit}, or choose a strategy for more",
    )


def _one_device_per_process(facts: Component, constraints: Constraints) -> Incompatibility | None:
    """Refuse to drive several devices from one process where the hardware cannot."""
    accelerator, number = constraints.accelerator, constraints.num_devices
    if facts.starts_processes or number == 1:
        return None
    if accelerator.facts.devices_share_process:
        return None
    return Incompatibility(
        problem=f"drives {number} devices from one process, which accelerator {accelerator.name!r} cannot",
        hint="ask for devices=1, or choose a strategy with one process per device",
    )


def _too_many_nodes(facts: Component, constraints: Constraints) -> Incompatibility | None:
    if constraints.num_nodes == 1 or facts.multi_node:
        return None
    return Incompatibility(
        problem=f"runs on one machine only, and not on num_nodes={constraints.num_nodes}",
        hint="ask for one, or choose a strategy for several",
    )


def _no_script(facts: Component, constraints: Constraints) -> Incompatibility | None:
    if not constraints.interactive or facts.notebook_safe or not constraints.needs_starting:
        return None
    return Incompatibility(
        problem="starts its processes from a script, and here is none (a notebook, a prompt, python -c, or a worker of "
        "another program)",
        hint="run a script, ask for devices=1, or choose a strategy that works here",
    )


# The first rule that applies is the error: hardware and processes that exist come before options that can be changed.
_RULES: tuple[Callable[[Component, Constraints], Incompatibility | None], ...] = (
    _other_accelerator,
    _too_many_processes,
    _too_many_devices,
    _one_device_per_process,
    _too_many_nodes,
    _other_precision,
    _no_script,
)


def listed(names: Iterable[str], joint: str = "") -> str:
    """Return quoted names for a message, the last one after ``joint`` if there is one; ``"none"`` without names."""
    quoted = [repr(name) for name in names]
    if joint and len(quoted) > 1:
        return f"{', '.join(quoted[:-1])} {joint} {quoted[-1]}"
    return ", ".join(quoted) or "none"
