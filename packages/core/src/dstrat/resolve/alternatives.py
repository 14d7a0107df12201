"""Strategies to suggest instead of one that does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.errors import DstratError
from dstrat.resolve.part import ability_of_offer

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.interfaces.strategy import Strategy
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component
    from dstrat.plugins.offer import Offer
    from dstrat.resolve.part import Ability, Part

_MOST_ALIASES = 4


def suggest_strategies(
    catalog: Catalog, fits: Callable[[Ability], bool], *, instead_of: Part[Strategy] | None = None
) -> str:
    """Return aliases of strategies that can be used, in parentheses for the end of a message; empty where none fits.

    Those of the same package come first, then automatic choices and those that require little.

    Args:
        catalog: What there is.
        fits: Returns whether a strategy with this ability would do.
        instead_of: The strategy that does not fit.
    """
    package = None if instead_of is None else _package_of(instead_of)
    fitting = [offer.component for offer in catalog.offers("strategy") if _is_usable(offer, catalog, fits)]
    fitting.sort(key=lambda c: (not c.target_name.startswith(f"{package}."), c.auto is None, len(c.requires)))
    plain = [component for component in fitting if not any(_extends(component, other) for other in fitting)]
    aliases = ", ".join(repr(component.alias) for component in plain[:_MOST_ALIASES])
    return f" ({aliases})" if aliases else ""


def _package_of(strategy: Part[Strategy]) -> str:
    """Return the Python package of a strategy."""
    module = strategy.cls.__module__ if strategy.record is None else strategy.record.target_name
    return module.partition(".")[0].partition(":")[0]


def _is_usable(offer: Offer, catalog: Catalog, fits: Callable[[Ability], bool]) -> bool:
    try:
        return fits(ability_of_offer(offer, catalog)) and not catalog.missing_requirements(offer)
    except DstratError:  # its class or its requirements are wrong, which is an error where it is asked for
        return False


def _extends(component: Component, other: Component) -> bool:
    """Return whether the component is the other one with further options."""
    options = component.options
    presets_all = all(key in options and options[key] is value for key, value in other.options.items())
    return component.target == other.target and len(options) > len(other.options) and presets_all
