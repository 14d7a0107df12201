"""What a strategy can do, by its record or, where nobody describes it, by its class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.component import Component
    from dstrat.resolve.part import Part

_FROM_MEMORY = frozenset({None, "fork"})
"""Start methods that need no script: the new processes have the objects of this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Ability:
    """What a strategy can do.

    Attributes:
        accelerators: The accelerators or groups that it runs on; empty means any.
        precisions: The precisions that it runs; empty means any.
        starts_processes: Whether it runs one process per device.
        notebook_safe: Whether it starts them from an interactive session.
        max_devices: The most devices that it uses on one machine; None is no limit.
        multi_node: Whether it runs on more than one machine.
    """

    accelerators: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    starts_processes: bool
    notebook_safe: bool
    max_devices: int | None = None
    multi_node: bool

    def runs_on(self, accelerator: Part[Any]) -> bool:
        """Return whether it runs on the accelerator; every strategy does on one that nobody describes."""
        return not self.accelerators or not accelerator.names or bool(accelerator.names & {*self.accelerators})

    def runs_with(self, precision: Part[Any]) -> bool:
        """Return whether it runs with the precision; every strategy does with one that nobody describes."""
        return not self.precisions or not precision.names or bool(precision.names & {*self.precisions})


def ability_of(part: Part[Strategy]) -> Ability:
    """Return what the strategy can do."""
    if part.record is not None:
        return ability_by(part.record)
    method = start_method_of(part)
    return Ability(
        starts_processes=method is not None, notebook_safe=method in _FROM_MEMORY, multi_node=method is not None
    )


def ability_by(record: Component) -> Ability:
    """Return what a record says that its strategy can do."""
    return Ability(
        accelerators=record.accelerators,
        precisions=record.precisions,
        starts_processes=record.starts_processes,
        notebook_safe=record.notebook_safe,
        max_devices=record.max_devices,
        multi_node=record.multi_node,
    )


def start_method_of(part: Part[Strategy]) -> str | None:
    """Return how the strategy starts processes where it has to; None where it starts none."""
    return part.construct().start_method
