"""Conversion of what users pass to a Trainer from other libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.known import known_adapter, pip_command

if TYPE_CHECKING:
    from collections.abc import Iterable


def adapt(value: Any, expected: type[Any]) -> Any:
    """Return an object that a Trainer takes: the object itself, or what a plugin makes of another library's.

    What no plugin converts to the expected class is returned as it is, for the caller's check of the type.

    Args:
        value: What the user passed, None too.
        expected: TrainModule, DataModule, Callback or Logger.

    Raises:
        CatalogError: Two plugins convert it, or the one that does cannot be imported.
    """
    if value is None or isinstance(value, expected):
        return value
    offer = get_catalog().find_adapter(type(value))
    if offer is None:
        return value
    converted = offer.convert(value)
    return converted if isinstance(converted, expected) else value


def adapt_all(values: Iterable[Any], expected: type[Any]) -> list[Any]:
    """Return several objects, each as :func:`adapt` does."""
    return [adapt(value, expected) for value in values]


def install_hint(value: object) -> str:
    """Return the advice to install what converts an object, beginning with a semicolon; empty if nothing is known."""
    requirement = known_adapter(type(value))
    return f"; {pip_command(requirement)} lets it run as it is" if requirement else ""
