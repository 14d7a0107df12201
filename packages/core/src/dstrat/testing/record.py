"""Check of a component's record: complete, and consistent with its class."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.catalog import get_catalog
from dstrat.testing.advice import fail
from dstrat.testing.signatures import constructor_parameters

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.plugins.component import Component, Kind
    from dstrat.plugins.offer import Offer

_LONGEST_SUMMARY = 100


def check_record(offer: Offer) -> None:
    """Fail the test where the record of a component is incomplete, or names what cannot be."""
    component = offer.component
    catalog = get_catalog()
    missing = catalog.missing_requirements(offer)
    if missing:
        fail(f"{offer.title} requires {', '.join(missing)}, which is not installed, so that nothing can be tested")
    catalog.load(offer)
    problems = [*_summary_problems(component), *_reference_problems(component), *_option_problems(offer)]
    if problems:
        fail(f"the record of {offer.title} {'; and '.join(problems)}", cure="correct the record in plugin.py.")


def _summary_problems(component: Component) -> Iterator[str]:
    summary = component.summary
    if not summary.strip():
        yield "has no summary"
    elif "\n" in summary or len(summary) > _LONGEST_SUMMARY:
        yield f"has a summary of {len(summary)} characters, where tables show one line of {_LONGEST_SUMMARY}"
    elif summary.endswith("."):
        yield "has a summary with a full stop at its end, which no other has"


def _reference_problems(component: Component) -> Iterator[str]:
    """Yield what the record names that nothing installed offers; hardware may come from packages that are not here."""
    known = _names("precision")
    for name in component.precisions:
        if name not in known:
            yield f"names the precision {name!r}, which is none: possible are {', '.join(sorted(known))}"
    if component.max_devices is not None and component.max_devices < 1:
        yield f"has max_devices={component.max_devices}, so that it never runs"
    if component.max_devices == 1 and component.multi_node:
        yield "says multi_node=True with max_devices=1"


def _option_problems(offer: Offer) -> Iterator[str]:
    cls = get_catalog().load(offer)
    parameters = constructor_parameters(cls)
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in offer.component.options:
        if name not in parameters and not takes_any:
            yield f"presets {name!r}, which {cls.__name__} does not take"


def _names(kind: Kind) -> set[str]:
    return {name for offer in get_catalog().offers(kind) for name in (*offer.names, *offer.component.groups)}
