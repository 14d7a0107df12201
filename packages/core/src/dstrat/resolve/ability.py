"""Abilities of a strategy and of the hardware: by their records or, where these say nothing, by their classes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dstrat.plugins.component import NO_BACKEND
from dstrat.plugins.facts import accelerator_facts, declares_all, strategy_facts, with_class_facts

if TYPE_CHECKING:
    from dstrat.interfaces.accelerator import Accelerator
    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.part import Part


@dataclass(frozen=True, kw_only=True)  # without slots, which the cached device type needs
class Hardware:
    """An accelerator with what strategies require of it.

    Attributes:
        part: Where it comes from.
        live: The accelerator itself.
    """

    part: Part[Accelerator]
    live: Accelerator

    @property
    def name(self) -> str:
        """Its alias, or the name of the user's class."""
        return self.part.name

    @property
    def names(self) -> frozenset[str]:
        """Everything by which a strategy may mean it: aliases and groups; empty where nothing is known of it."""
        return self.part.names

    @cached_property
    def device_type(self) -> str:
        """The type of its torch devices."""
        record = self.part.record
        if self.part.catalog_name and record is not None and record.device_type is not None:
            return record.device_type
        return self.live.get_parallel_devices([0])[0].type

    @property
    def collectives(self) -> str:
        """The backend of its collectives; ``"none"`` where it has none."""
        return str(accelerator_facts(self.live)["process_group_backend"] or NO_BACKEND)

    @property
    def supports_torch_distributed(self) -> bool:
        """Whether torch.distributed can use the backend of its collectives."""
        return accelerator_facts(self.live)["supports_torch_distributed"] is True

    @property
    def devices_share_process(self) -> bool:
        """Whether one process can drive several of its devices."""
        return accelerator_facts(self.live)["devices_share_process"] is True


@dataclass(frozen=True, kw_only=True, slots=True)
class Ability:
    """What a strategy can do, and what it requires.

    Attributes:
        accelerators: The accelerators or groups that it is written for; empty means any.
        device_types: The types of devices that it can use; empty means any.
        precisions: The precisions that it runs; empty means any.
        uses_torch_distributed: Whether it needs an accelerator that torch.distributed supports.
        starts_processes: Whether it runs one process per device.
        notebook_safe: Whether it starts them from an interactive session.
        max_devices: The most devices that it uses on one machine; None is no limit.
        multi_node: Whether it runs on more than one machine.
    """

    accelerators: tuple[str, ...] = ()
    device_types: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    uses_torch_distributed: bool
    starts_processes: bool
    notebook_safe: bool
    max_devices: int | None = None
    multi_node: bool

    def runs_on(self, hardware: Hardware) -> bool:
        """Return whether it runs on the hardware."""
        return self.misfit(hardware) is None

    def misfit(self, hardware: Hardware) -> str | None:
        """Say why it does not run on the hardware, following the strategy's name; None where it does."""
        # A strategy that is written for some accelerators runs on one that nobody describes.
        if self.accelerators and hardware.names and not hardware.names & {*self.accelerators}:
            return f"cannot run on accelerator {hardware.name!r}, only on {_listed(self.accelerators)}"
        if self.uses_torch_distributed and not hardware.supports_torch_distributed:
            return (
                f"communicates through torch.distributed, which does not support accelerator {hardware.name!r} "
                f"(its collectives: {hardware.collectives})"
            )
        if self.device_types and hardware.device_type not in self.device_types:
            return (
                f"uses devices of the type {_listed(self.device_types, 'or')}, and those of accelerator "
                f"{hardware.name!r} are of the type {hardware.device_type!r}"
            )
        return None

    def runs_with(self, precision: Part[Any]) -> bool:
        """Return whether it runs with the precision; every strategy does with one that nobody describes."""
        return not self.precisions or not precision.names or bool(precision.names & {*self.precisions})

    def can_use(self, num_devices: int) -> bool:
        """Return whether it uses so many devices on one machine."""
        return self.starts_processes or self.max_devices is None or num_devices <= self.max_devices


def ability_of(part: Part[Strategy]) -> Ability:
    """Return what the strategy can do."""
    if part.record is not None:
        return _ability(part.record)
    facts = strategy_facts(part.cls, start_method_of(part))
    drives_several = facts.pop("drives_several_devices")
    return Ability(**facts, max_devices=None if facts["starts_processes"] or drives_several else 1)


def ability_of_offer(offer: Offer, catalog: Catalog) -> Ability:
    """Return what an offered strategy can do; its class is imported where its record does not say.

    Raises:
        CatalogError: The class is needed, and cannot be used.
    """
    record = offer.component
    return _ability(record if declares_all(record) else with_class_facts(record, catalog.load(offer)))


def _ability(record: Component) -> Ability:
    """Return what a record that declares all facts says of its strategy."""
    is_limited = not record.starts_processes and not record.drives_several_devices
    return Ability(
        accelerators=record.accelerators,
        device_types=record.device_types,
        precisions=record.precisions,
        uses_torch_distributed=record.uses_torch_distributed is True,
        starts_processes=record.starts_processes is True,
        notebook_safe=record.notebook_safe is not False,
        max_devices=1 if is_limited else record.max_devices,
        multi_node=record.multi_node is True,
    )


def start_method_of(part: Part[Strategy]) -> str | None:
    """Return how the strategy starts processes where it has to; None where it starts none."""
    return part.construct().start_method


def _listed(names: tuple[str, ...], joint: str = "") -> str:
    quoted = [repr(name) for name in names]
    if joint and len(quoted) > 1:
        return f"{', '.join(quoted[:-1])} {joint} {quoted[-1]}"
    return ", ".join(quoted)
