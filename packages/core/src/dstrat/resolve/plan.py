"""Plan of a run: each choice with its reason."""

from __future__ import annotations

import dataclasses
import html
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from dstrat.launch.job import StartMethod
    from dstrat.plugins.component import Kind
    from dstrat.resolve.processes import StartedBy


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRow:
    """One row of a plan.

    Attributes:
        subject: The decision, such as ``"accelerator"``.
        value: The decision, such as ``"cpu"``.
        reason: Why, a few words.
        owner: The distribution that offers it, such as ``"dstrat 0.1.0"``; empty for a class of the user.
    """

    subject: str
    value: str
    reason: str
    owner: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Everything that is decided before a run, with the reasons.

    ``str(plan)`` is a table for people.  A name below is an alias, or the name of the user's class.

    Attributes:
        choices: The rows of the table.
        strategy: Name of the strategy.
        strategy_alias: Its alias, also where the user passed its class or an instance; otherwise the name of the class.
        accelerator: Name of the accelerator.
        cluster_environment: Name of the cluster environment.
        precision: The flag, such as ``"bf16-mixed"``.
        checkpoint_io: Name of the checkpoint io.
        device_indices: Indices of each machine's devices; empty where the strategy was constructed with devices.
        num_devices: Number of devices of each machine.
        num_nodes: Number of machines.
        processes_per_node: Number of processes on each machine.
        world_size: Number of processes of the whole job.
        started_by: Who starts the processes: ``"nobody"`` where this one is enough, ``"dstrat"``, ``"launcher"``, which
            is a plugin, or ``"cluster"``, which has started them already.
        start_method: How the processes of this machine will be started; None where none are.
        max_restarts: How often dstrat starts all processes again after one of them has failed.
        elastic: Whether the others go on in their processes when one was killed; ``"replace"`` if a new one joins.
        preemption_deadline: Seconds from SIGTERM or SIGUSR1 until a scheduler ends the job; None where none does.
        catalog_names: For each kind of component that was selected by its alias, its full alias.
    """

    choices: tuple[PlanRow, ...]
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
    max_restarts: int = 0
    elastic: bool | Literal["replace"] = False
    preemption_deadline: float | None = None

    def __str__(self) -> str:
        rows = [dataclasses.astuple(row) for row in self.choices]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)
        return "\n".join(line.rstrip() for line in lines)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        rows = [[html.escape(cell) for cell in dataclasses.astuple(row)] for row in self.choices]
        left = 'style="text-align:left"'  # a notebook aligns cells to the right, as if they were numbers
        lines = (
            f"<tr><th {left}>{subject}</th>{''.join(f'<td {left}>{cell}</td>' for cell in cells)}</tr>"
            for subject, *cells in rows
        )
        return f"<table>{''.join(lines)}</table>"

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as dicts, tuples, strings and numbers, for JSON."""
        return {**dataclasses.asdict(self), "catalog_names": dict(self.catalog_names)}
