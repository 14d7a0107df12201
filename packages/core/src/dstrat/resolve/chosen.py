"""A part together with the reason why it was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from dstrat.resolve.choice import Choice
from dstrat.resolve.part import part_from

if TYPE_CHECKING:
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Kind
    from dstrat.resolve.given import Given
    from dstrat.resolve.part import Part

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen(Generic[T]):
    """A part, and why it was chosen.

    Attributes:
        part: Where it comes from.
        reason: Why, a few words.
        live: The part itself, ready to be asked.
    """

    part: Part[T]
    reason: str
    live: T

    def choice(self, subject: str, value: str | None = None) -> Choice:
        """Return the plan's line for it."""
        return Choice(subject=subject, value=value or self.part.name, reason=self.reason, owner=self.part.owner)


def chosen_as_given(kind: Kind, given: Given, catalog: Catalog, *arguments: Any) -> Chosen[Any]:
    """Return the part that the user gave.

    Args:
        kind: What it is.
        given: What the user gave, and where.
        catalog: Where aliases are looked up.
        *arguments: For its constructor, where it is still to be constructed.

    Raises:
        RequestError: It is of another type.
        CatalogError: Nothing usable has that alias.
        MisuseError: It cannot be constructed.
    """
    part: Part[Any] = part_from(kind, given.value, catalog, place=given.place)
    reason = f"given to {given.place}" if given.in_strategy else "asked for"
    return Chosen(part=part, reason=reason, live=part.construct(*arguments))
