"""``dstrat show``: all that is known of one component, without importing its class."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dstrat.cli.catalog import loaded_catalog, offer_as_dict
from dstrat.cli.docstring import first_line
from dstrat.cli.output import json_option, print_json, print_table
from dstrat.plugins.component import KINDS, NO_BACKEND
from dstrat.plugins.known import KNOWN
from dstrat.plugins.offer import kind_label

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component, Kind
    from dstrat.plugins.offer import Offer


_UNDECLARED = "as its class says"


@click.command(short_help="Show all that is known of an alias.")
@click.argument("alias")
@click.option("--kind", type=click.Choice(KINDS), help="Where the alias names things of several kinds.")
@json_option
def show(alias: str, kind: Kind | None, as_json: bool) -> None:
    """Show what ALIAS (or ALIAS@DISTRIBUTION, or the name of a group) is, who offers it, and what it needs."""
    catalog = loaded_catalog()
    offers = _offers(alias, [kind] if kind else _kinds(alias, catalog), catalog)
    if as_json:
        print_json([_as_dict(offer, catalog) for offer in offers])
        return
    for number, offer in enumerate(offers):
        if number:
            click.echo()
        print_table([(label, text) for label, text in _lines(offer, catalog) if text])


def _offers(alias: str, kinds: Sequence[Kind], catalog: Catalog) -> list[Offer]:
    members = [offer for kind in kinds for offer in catalog.offers(kind) if alias in offer.component.groups]
    return members or [catalog.find(kind, alias) for kind in kinds]


def _kinds(alias: str, catalog: Catalog) -> list[Kind]:
    """Return the kinds in which the name means something; that of strategies where it means nothing."""
    bare = alias.partition("@")[0]
    found = [
        kind for kind in KINDS if any(bare in (*offer.names, *offer.component.groups) for offer in catalog.offers(kind))
    ]
    known: list[Kind] = [kind for kind in KINDS if bare in KNOWN.get(kind, {})]
    return found or known[:1] or ["strategy"]


def _as_dict(offer: Offer, catalog: Catalog) -> dict[str, object]:
    return {**offer_as_dict(offer, catalog), "docstring": first_line(offer.component.target_name)}


def _lines(offer: Offer, catalog: Catalog) -> Iterable[tuple[str, str]]:
    component = offer.component
    missing = catalog.missing_requirements(offer)
    yield kind_label(component.kind), component.alias
    yield "also called", ", ".join([*component.synonyms, *component.groups])
    yield "what it is", component.summary
    yield "from", offer.owner_label
    yield "class", component.target_name.replace(":", ".")
    yield "docstring", first_line(component.target_name)
    yield "preset", ", ".join(f"{name}={value!r}" for name, value in component.options.items())
    yield "requires", ", ".join(f"{text}{' (missing)' if text in missing else ''}" for text in component.requires)
    if component.kind == "strategy":
        yield from _strategy_lines(component)
    if component.kind == "accelerator":
        yield from _accelerator_lines(component)
    yield "automatic", "never chosen" if component.auto is None else f"rank {component.auto}, the highest is chosen"


def _strategy_lines(component: Component) -> Iterable[tuple[str, str]]:
    yield "accelerators", ", ".join(component.accelerators) or "any"
    yield "device types", ", ".join(component.device_types) or "any"
    yield "collectives", _said(component.uses_torch_distributed, "through torch.distributed", "its own, or none")
    yield "precisions", ", ".join(component.precisions) or "any"
    yield "devices", _devices(component)
    yield "processes", _said(component.starts_processes, "one per device", "one")
    yield "machines", _said(component.multi_node, "several", "one")
    yield "notebooks", _said(component.notebook_safe, "yes", "no")


def _devices(component: Component) -> str:
    if component.max_devices is not None:
        return f"at most {component.max_devices}"
    if component.starts_processes or component.drives_several_devices:
        return "any number"
    return _said(component.drives_several_devices, "any number", "one")


def _accelerator_lines(component: Component) -> Iterable[tuple[str, str]]:
    yield "device type", component.device_type or _UNDECLARED
    yield "collectives", _collectives(component)
    yield "devices", _said(component.devices_share_process, "several in a process", "one in each process")
    yield "strategies", ", ".join(f"{other} for {alias}" for alias, other in component.strategies.items())


def _collectives(component: Component) -> str:
    backend = component.process_group_backend
    if backend is None or backend == NO_BACKEND:
        return backend or _UNDECLARED
    through = {True: ", through torch.distributed", False: ", not through torch.distributed", None: ""}
    return f"{backend}{through[component.supports_torch_distributed]}"


def _said(fact: bool | None, yes: str, no: str) -> str:
    """Return a fact in words."""
    if fact is None:
        return _UNDECLARED
    return yes if fact else no
