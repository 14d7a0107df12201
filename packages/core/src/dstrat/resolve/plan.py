"""Plan of a run: each choice with its reason."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrat.launch.processes import StartMethod
    from dstrat.plugins.component import Kind
    from dstrat.resolve.processes import StartedBy


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """What will run: each choice with its reason and its owner, and the facts that follow.

    ``str(plan)`` is a table for people.  A name below is an alias, or the name of a class of the user's own.

    Attributes:
        choices: The lines of the table.
        strategy: Name of the strategy.
        strategy_alias: Its alias, also where the user gave a class or an instance; the name of a class of the user's
            own.
        accelerator: Name of the accelerator.
        cluster_environment: Name of the cluster environment.
        precision: The flag, such as ``"bf16-mixed"``.
        checkpoint_io: Name of the checkpoint io.
        device_indices: Indices of each machine's devices; empty where the strategy was constructed with devices.
        num_devices: Number of devices of each machine.
        num_nodes: Number of machines.
        processes_per_node: Number of processes on each machine.
        world_size: Number of processes of the whole job.
        started_by: Who starts the processes: ``"nobody"`` where this one is enough, ``"dstrat"``, or ``"cluster"``,
            which has started them already.
        start_method: How the processes of this machine will be started; None where none are.
        catalog_names: For each kind of part that comes from the catalog, its full alias.
    """

    choices: tuple[Choice, ...]
    strategy: str
    strategy_alias: str
    accelerator: str
    cluster_environment: str
    precision: str
    checkpoint_io: str
    device_indices: tuple[int, ...]
    num_devices: int
    num_nodes: int
    processes_per_node: int
    world_size: int
    started_by: StartedBy
    start_method: StartMethod | None
    catalog_names: tuple[tuple[Kind, str], ...]

    def __str__(self) -> str:
        rows = [(choice.subject, choice.value, choice.reason, choice.owner) for choice in self.choices]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain dicts, lists, texts and numbers, for JSON."""
        return {**dataclasses.asdict(self), "catalog_names": dict(self.catalog_names)}


# One line of a plan.


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """What was chosen for one subject, and why.

    Attributes:
        subject: What was to be chosen, such as ``"accelerator"``.
        value: What was chosen, such as ``"cpu"``.
        reason: Why, a few words.
        owner: The distribution that brings it, such as ``"dstrat 0.1.0"``; empty for the user's own.
    """

    subject: str
    value: str
    reason: str
    owner: str = ""
