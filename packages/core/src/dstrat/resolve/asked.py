"""The strategy that was asked for, and the one that serves its alias on an accelerator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from dstrat.errors import CatalogError, ConflictError
from dstrat.resolve.ability import ability_of
from dstrat.resolve.given import written
from dstrat.resolve.part import constructed_strategy

if TYPE_CHECKING:
    from typing import Any

    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component
    from dstrat.resolve.ability import Hardware
    from dstrat.resolve.chosen import Chosen
    from dstrat.resolve.part import Part


@dataclass(frozen=True, kw_only=True, slots=True)
class AskedStrategy:
    """The strategy that was asked for; on an accelerator that names another one for its alias, it is that one.

    Attributes:
        names: The alias that was asked for, with its synonyms; empty where an owner was named, or no alias given.
        part: The strategy; None where its alias cannot be used.
        error: Why not.
    """

    names: tuple[str, ...]
    part: Part[Strategy] | None
    error: CatalogError | None = None

    def runs_on(self, hardware: Hardware) -> bool:
        """Return whether it, or what serves its alias there, runs on the hardware."""
        if self.substitute(hardware.part) is not None:
            return True
        return self.part is not None and ability_of(self.part).runs_on(hardware)

    def substitute(self, accelerator: Part[Any]) -> str | None:
        """Return the alias of what serves this one's alias on the accelerator; None where it is used itself."""
        strategies = accelerator.record.strategies if accelerator.record is not None else {}
        return next((strategies[name] for name in self.names if name in strategies), None)

    def on(self, accelerator: Chosen[Any], catalog: Catalog) -> tuple[Part[Strategy], str]:
        """Return the strategy for an accelerator, and why it is that one.

        Raises:
            CatalogError: Its alias, or that of what serves it there, cannot be used.
            ConflictError: It is a class or an instance, and the accelerator names another strategy for its alias.
            MisuseError: It cannot be constructed.
        """
        alias = self.substitute(accelerator.part)
        if alias is None:
            if self.part is None:
                raise self.error or CatalogError(f"strategy {self.names} cannot be used")
            _check_not_served(self.part, accelerator.part)
            return self.part, "asked for"
        reason = f"serves {self.names[0]!r} on accelerator {accelerator.part.name!r}"
        try:
            return constructed_strategy(alias, catalog, place=written("strategy", alias)), reason
        except CatalogError as error:
            raise type(error)(
                f"{accelerator.part.title} lets {alias!r} serve {self.names[0]!r}, and {error}"
            ) from error


def asked_strategy(value: object, catalog: Catalog) -> AskedStrategy | None:
    """Return the strategy that a user means; None lets dstrat choose.

    Raises:
        RequestError: It is of another type.
        CatalogError: Nothing usable has that alias, and no accelerator names another strategy for it.
        MisuseError: It cannot be constructed.
    """
    if isinstance(value, str) and value == "auto":
        return None
    names = _names(value, catalog)
    try:
        part = constructed_strategy(value, catalog, place=written("strategy", value))
    except CatalogError as error:
        if not _is_served(names, catalog):
            raise
        return AskedStrategy(names=names, part=None, error=error)
    return AskedStrategy(names=names, part=part)


def _check_not_served(part: Part[Strategy], accelerator: Part[Any]) -> None:
    """Refuse the class of an alias that another strategy serves on the accelerator, where it would not work.

    Naming the owner of an alias insists on its strategy.
    """
    if part.catalog_name:
        return
    served = accelerator.record.strategies.get(part.alias) if accelerator.record is not None else None
    if served is not None:
        raise ConflictError(
            f"{part.title} cannot run on {accelerator.title}, where {served!r} serves {part.alias!r}: "
            f"give strategy={served!r}, or an instance of its class"
        )


def _names(value: object, catalog: Catalog) -> tuple[str, ...]:
    """Return the alias that a user wrote, then everything that the same strategy is called."""
    if not isinstance(value, str) or "@" in value:
        return ()
    offered = {name for offer in catalog.offers("strategy") if value in offer.names for name in offer.names}
    return (value, *sorted(offered - {value}))


def _is_served(names: tuple[str, ...], catalog: Catalog) -> bool:
    records: list[Component] = [offer.component for offer in catalog.offers("accelerator")]
    return any(name in record.strategies for record in records for name in names)
