"""Compatibility of a strategy with accelerator, devices, machines, precision and processes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.errors import ClusterError, ConflictError, RequestError
from dstrat.plugins.component import NO_BACKEND
from dstrat.resolve.cluster import LOCAL

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

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
    if accelerator.offer is not None and record is not None and record.device_type is not None:
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


# Compatibility with everything else


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
    return next(_reasons_against(facts, constraints), None)


def _reasons_against(facts: Component, constraints: Constraints) -> Iterator[Incompatibility]:
    """Yield the reasons against a strategy, each with a hint.

    The first one is the error: hardware and processes that exist come before options that can be changed.
    """
    accelerator, precision, number = constraints.accelerator, constraints.precision, constraints.num_devices
    if (problem := accelerator_problem(facts, accelerator)) is not None:
        choice = "one of these" if facts.accelerators else "another accelerator"
        yield Incompatibility(problem=problem, hint=f"choose {choice}, or a strategy for {accelerator.name!r}")
    if constraints.num_started > constraints.num_nodes and not facts.starts_processes:
        # Local ones were started by another Trainer of this script.
        hint = (
            "use one strategy and the same devices throughout the script"
            if constraints.cluster.name == LOCAL
            else "start the script once on each machine"
        )
        yield Incompatibility(
            problem=(
                f"runs in one process on each machine, and {constraints.num_started} were started "
                f"({constraints.cluster.name}: {constraints.cluster.reason})"
            ),
            hint=f"{hint}, or choose a strategy for several processes",
            error=ClusterError,
        )
    limit = max_devices(facts)
    if limit is not None and number > limit:
        yield Incompatibility(
            problem=f"uses at most {limit} device{'s' if limit > 1 else ''} on a machine, and not {number}",
            hint=f"ask for devices={limit}, or choose a strategy for more",
        )
    if number != 1 and not facts.starts_processes and not accelerator.facts.devices_share_process:
        yield Incompatibility(
            problem=f"drives {number} devices from one process, which accelerator {accelerator.name!r} cannot",
            hint="ask for devices=1, or choose a strategy with one process per device",
        )
    if constraints.num_nodes != 1 and not facts.multi_node:
        yield Incompatibility(
            problem=f"runs on one machine only, and not on num_nodes={constraints.num_nodes}",
            hint="ask for one, or choose a strategy for several",
        )
    # A strategy that is written for some precisions runs with one without a record.
    if facts.precisions and precision.names and not precision.names & {*facts.precisions}:
        yield Incompatibility(
            problem=f"cannot run with precision {precision.name!r}, only with {listed(facts.precisions)}",
            hint=f"choose one of these, or a strategy for {precision.name!r}",
        )
    if constraints.interactive and not facts.notebook_safe and constraints.needs_starting:
        yield Incompatibility(
            problem="starts its processes from a script, and here is none (a notebook, a prompt, python -c, or a "
            "worker of another program)",
            hint="run a script, ask for devices=1, or choose a strategy that works here",
        )


def listed(names: Iterable[str], joint: str = "") -> str:
    """Return quoted names for a message, the last one after ``joint`` if there is one; ``"none"`` without names."""
    quoted = [repr(name) for name in names]
    if joint and len(quoted) > 1:
        return f"{', '.join(quoted[:-1])} {joint} {quoted[-1]}"
    return ", ".join(quoted) or "none"
