"""``dstrat strategies`` and ``dstrat accelerators``: what can be chosen, and what else could be installed."""

from __future__ import annotations

from collections import Counter
from itertools import groupby
from typing import TYPE_CHECKING

import click

from dstrat.cli.catalog import loaded_catalog, offer_as_dict
from dstrat.cli.output import json_option, print_json, print_table
from dstrat.plugins.known import KNOWN, known_distribution, quoted
from dstrat.plugins.names import normalized

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Kind
    from dstrat.plugins.offer import Offer


@click.command()
@json_option
def strategies(as_json: bool) -> None:
    """List the strategies."""
    _list("strategy", "strategies", as_json)


@click.command()
@json_option
def accelerators(as_json: bool) -> None:
    """List the accelerators, whether or not this machine has them."""
    _list("accelerator", "accelerators", as_json)


def _list(kind: Kind, plural: str, as_json: bool) -> None:
    catalog = loaded_catalog()
    offers = catalog.offers(kind)
    hints = _not_installed(kind, catalog)
    if as_json:
        listed = [offer_as_dict(offer, catalog) for offer in offers]
        print_json({plural: listed, "not_installed": hints})
        return
    if offers:
        print_table(list(_rows(offers, catalog)))
    else:
        click.echo(f"no {plural} are installed")
    if hints:
        click.echo("\nnot installed (pip install ...):")
        print_table([(f"  {requirement}", ", ".join(aliases)) for requirement, aliases in hints.items()])


def _rows(offers: Sequence[Offer], catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Yield, for each owner, a row with its name and then one for each of its components."""
    times = Counter(offer.component.alias for offer in offers)
    for owner, offered in groupby(sorted(offers, key=lambda offer: offer.owner), lambda offer: offer.owner_label):
        yield owner, ""
        for offer in offered:
            is_unique = times[offer.component.alias] == 1
            name = ", ".join((*offer.names, *offer.component.groups)) if is_unique else offer.full_alias
            yield f"  {name}", _description(offer, catalog)


def _description(offer: Offer, catalog: Catalog) -> str:
    missing = catalog.missing_requirements(offer)
    return f"{offer.component.summary} (needs {', '.join(missing)})" if missing else offer.component.summary


def _not_installed(kind: Kind, catalog: Catalog) -> dict[str, list[str]]:
    """Return what could be installed, quoted for a shell, and the aliases that each would bring."""
    offered = {name for offer in catalog.offers(kind) for name in offer.names}
    installed = {normalized(plugin.distribution) for plugin in catalog.plugins}
    hints: dict[str, list[str]] = {}
    for alias, requirement in KNOWN[kind].items():
        if alias not in offered and known_distribution(requirement) not in installed:
            hints.setdefault(requirement, []).append(alias)
    return {quoted(requirement): hints[requirement] for requirement in sorted(hints)}
