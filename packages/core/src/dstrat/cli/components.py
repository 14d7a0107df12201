"""``dstrat strategies``, ``accelerators``, ``show`` and ``plugins``."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from dataclasses import asdict, fields
from importlib.metadata import PackageNotFoundError, distribution
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import click

from dstrat.cli.output import json_option, print_json, print_table
from dstrat.cli.source import constructor_options, first_line, has_fixed_options
from dstrat.errors import MisuseError
from dstrat.plugins.catalog import get_catalog
from dstrat.plugins.component import KINDS, NO_BACKEND
from dstrat.plugins.known import KNOWN, KNOWN_ADAPTERS, known_distribution, origin_of, pip_command, quoted
from dstrat.plugins.offer import kind_label
from dstrat.plugins.options import check_names, parse_alias
from dstrat.plugins.settings import normalized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from dstrat.cli.source import ConstructorOption
    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component, Kind
    from dstrat.plugins.offer import Offer, Plugin


@click.command(short_help="List the strategies, and count their variants.")
@json_option
@click.option("--all", "lists_all", is_flag=True, help="List each variant, and packages that are not published yet.")
def strategies(as_json: bool, lists_all: bool) -> None:
    """List the strategies; variants of one, such as ddp_spawn of ddp, are counted."""
    _list("strategy", "strategies", as_json, is_folded=not lists_all)


@click.command()
@json_option
def accelerators(as_json: bool) -> None:
    """List the accelerators, whether or not this machine has them."""
    _list("accelerator", "accelerators", as_json)


def _list(kind: Kind, plural: str, as_json: bool, *, is_folded: bool = False) -> None:
    catalog = loaded_catalog()
    offers = catalog.offers(kind)
    hints = _not_installed(kind, catalog)
    other_hints = _not_installed_without(kind, catalog) if kind == "strategy" else {}
    if as_json:
        listed = [offer_as_dict(offer, catalog) for offer in offers]
        print_json({plural: listed, "not_installed": hints, "not_installed_others": other_hints})
        return
    if not offers:
        click.echo(f"no {plural} are installed")
    elif is_folded:
        _print_folded(offers, catalog)
    else:
        print_table(list(_rows(offers, catalog)))
    if is_folded:
        hints = {requirement: base_aliases(names) for requirement, names in hints.items()}
    if hints or other_hints:
        click.echo(f"\nnot installed (for example: {pip_command(next(iter({**hints, **other_hints})))}):")
        rows = [(requirement, ", ".join(aliases)) for requirement, aliases in hints.items()]
        rows += [
            (requirement, "; ".join(f"{label} {', '.join(base_aliases(names))}" for label, names in offered.items()))
            for requirement, offered in other_hints.items()
        ]
        print_table([(f"  {requirement}", offered) for requirement, offered in rows])


def _rows(
    offers: Sequence[Offer], catalog: Catalog, variants: Mapping[int, int] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield a row with the name of each owner, followed by one for each of its components.

    Args:
        offers: The components.
        catalog: The catalog, for their missing requirements.
        variants: Number of variants of a component that are not shown, by the ``id`` of its offer.
    """
    times = Counter(offer.component.alias for offer in offers)
    for owner, offered in groupby(sorted(offers, key=lambda offer: offer.owner), lambda offer: offer.owner_label):
        yield owner, ""
        for offer in offered:
            is_unique = times[offer.component.alias] == 1
            # The alias of two owners alone would raise an error: with @owner it can be copied.
            name = ", ".join((*offer.names, *offer.component.groups)) if is_unique else offer.full_alias
            count = (variants or {}).get(id(offer), 0)
            yield f"  {name} (+{count})" if count else f"  {name}", _description(offer, catalog)


def _print_folded(offers: Sequence[Offer], catalog: Catalog) -> None:
    """Print each owner's strategies without variants, and below them those whose requirements are missing."""
    bases = [offer for offer in offers if base_of(offer, offers) is None]
    variants = Counter(id(base) for offer in offers if (base := base_of(offer, offers)) is not None)
    usable = [offer for offer in bases if not catalog.missing_requirements(offer)]
    if usable:
        print_table(list(_rows(usable, catalog, variants)))
    if variants:
        click.echo("(+n) counts variants, such as ddp_spawn of ddp: dstrat strategies --all")
    lacking = [(offer.component.alias, missing) for offer in bases if (missing := catalog.missing_requirements(offer))]
    if lacking:
        click.echo("what these need is not installed:")
        print_table([(f"  {alias}", ", ".join(missing)) for alias, missing in lacking])


def base_of(offer: Offer, offers: Iterable[Offer]) -> Offer | None:
    """Return the offer of which another is a variant, by owner, class and the beginning of its alias; None without."""
    bases = [
        base
        for base in offers
        if base.owner == offer.owner
        and base.component.target == offer.component.target
        and offer.component.alias.startswith(f"{base.component.alias}_")
    ]
    return min(bases, key=lambda base: len(base.component.alias), default=None)


def base_aliases(aliases: Sequence[str]) -> list[str]:
    """Return the aliases that do not begin with another one."""
    return [alias for alias in aliases if not any(alias.startswith((f"{other}_", f"{other}-")) for other in aliases)]


def _description(offer: Offer, catalog: Catalog) -> str:
    missing = catalog.missing_requirements(offer)
    return f"{offer.component.summary} (needs {', '.join(missing)})" if missing else offer.component.summary


def _not_installed(kind: Kind, catalog: Catalog) -> dict[str, list[str]]:
    """Return the requirements that could be installed, quoted for a shell, each with its aliases."""
    offered = {name for offer in catalog.offers(kind) for name in offer.names}
    installed = {normalized(plugin.distribution) for plugin in catalog.plugins}
    hints: dict[str, list[str]] = {}
    for alias, requirement in KNOWN[kind].items():
        if alias not in offered and known_distribution(requirement) not in installed:
            hints.setdefault(requirement, []).append(alias)
    return {quoted(requirement): hints[requirement] for requirement in sorted(hints)}


def _not_installed_without(kind: Kind, catalog: Catalog) -> dict[str, dict[str, list[str]]]:
    """Return the requirements that could be installed and offer nothing of a kind: their aliases by labels of kinds."""
    installed = {normalized(plugin.distribution) for plugin in catalog.plugins}
    # Accelerators come with strategies of their own, and have their own listing.
    excluded = {*map(known_distribution, KNOWN[kind].values()), *KNOWN["accelerator"].values(), *installed}
    labels: dict[str, Mapping[str, str]] = {kind_label(other): table for other, table in KNOWN.items()}
    hints: dict[str, dict[str, list[str]]] = {}
    for label, table in {**labels, "adapter for": KNOWN_ADAPTERS}.items():
        for alias, requirement in table.items():
            if known_distribution(requirement) not in excluded:
                hints.setdefault(requirement, {}).setdefault(label, []).append(alias)
    return {quoted(requirement): hints[requirement] for requirement in sorted(hints)}


# The catalog without output of plugins, and its records for JSON


def loaded_catalog() -> Catalog:
    """Return the catalog of this process."""
    # What a plugin prints while it is loaded must not get into a table or into JSON.
    with contextlib.redirect_stdout(sys.stderr):
        return get_catalog()


def offer_as_dict(offer: Offer, catalog: Catalog) -> dict[str, Any]:
    """Return the facts of an offer, without importing its class."""
    component = offer.component
    facts = {field.name: getattr(component, field.name) for field in fields(component)}
    return {
        **facts,
        "target": component.target_name,
        "owner": offer.owner,
        "version": offer.version,
        "missing_requirements": catalog.missing_requirements(offer),
    }


# ``dstrat show``: the facts of one component, without importing its class


_SET_BY_TRAINER = ("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin")

_UNDECLARED = "as its class says"  # a fact that the record leaves open; reading it there would import the class


@click.command(short_help="Show all that is known of an alias.")
@click.argument("alias")
@click.option("--kind", type=click.Choice(KINDS), help="If the alias names components of several kinds.")
@json_option
def show(alias: str, kind: Kind | None, as_json: bool) -> None:
    """Show what ALIAS (or ALIAS@DISTRIBUTION, or the name of a group) is, who offers it, and what it needs.

    Its options are listed, and the names of those in "ALIAS(option=value)" checked.
    """
    catalog = loaded_catalog()
    offers = _offers(alias, [kind] if kind else _kinds(alias, catalog), catalog)
    for offer in offers:
        _check_options(offer)
    if as_json:
        print_json(
            [
                {
                    **offer_as_dict(offer, catalog),
                    "docstring": first_line(offer.component.target_name),
                    "arguments": [asdict(option) for option in _user_options(offer)],
                    "guide": _guide(offer),
                }
                for offer in offers
            ]
        )
        return
    for number, offer in enumerate(offers):
        if number:
            click.echo()
        print_table([(label, text) for label, text in _lines(offer, catalog) if text])
        if options := _user_options(offer):
            click.echo(f"\noptions of {offer.component.target_name.rpartition(':')[2]}, with their defaults:")
            print_table([(f"  {option.name}={option.default}", _option_text(option)) for option in options])


def _offers(alias: str, kinds: Sequence[Kind], catalog: Catalog) -> list[Offer]:
    members = [offer for kind in kinds for offer in catalog.offers(kind) if alias in offer.component.groups]
    return members or [catalog.find(kind, alias) for kind in kinds]


def _kinds(alias: str, catalog: Catalog) -> list[Kind]:
    """Return the kinds that have the name, or the kind of a component that could be installed, or the strategies."""
    bare = parse_alias(alias).alias
    matches = [
        kind for kind in KINDS if any(bare in (*offer.names, *offer.component.groups) for offer in catalog.offers(kind))
    ]
    installable: list[Kind] = [kind for kind in KINDS if bare in KNOWN.get(kind, {})]
    return matches or installable[:1] or ["strategy"]


def _lines(offer: Offer, catalog: Catalog) -> Iterable[tuple[str, str]]:
    component = offer.component
    missing = catalog.missing_requirements(offer)
    yield kind_label(component.kind), component.alias
    yield "also called", ", ".join([*component.synonyms, *component.groups])
    yield "what it is", component.summary
    yield "legacy", component.legacy
    yield "approximation", component.approximation
    yield "from", offer.owner_label
    yield "class", component.target_name.replace(":", ".")
    yield "docstring", first_line(component.target_name)
    presets = offer.presets if offer.options else component.options
    yield "preset", ", ".join(f"{name}={value!r}" for name, value in presets.items())
    yield "options", ", ".join(_option_texts(offer))
    yield "requires", ", ".join(f"{text}{' (missing)' if text in missing else ''}" for text in component.requires)
    if component.kind == "strategy":
        yield from _strategy_lines(component)
    if component.kind == "accelerator":
        yield from _accelerator_lines(component)
    yield "guide", _guide(offer)
    yield "automatic", "never chosen" if component.auto is None else f"rank {component.auto}, the highest is chosen"


def _user_options(offer: Offer) -> list[ConstructorOption]:
    """Return the options of a component's constructor, without those that the Trainer sets."""
    return [option for option in constructor_options(offer.component.target_name) if option.name not in _SET_BY_TRAINER]


def _option_texts(offer: Offer) -> Iterator[str]:
    """Yield the options that the user wrote after the alias."""
    known = {option.name for option in constructor_options(offer.component.target_name)}
    for name, value in offer.options.items():
        yield f"{name}={value!r}{'' if name in known else ' (not checked: its class has **kwargs)'}"


def _check_options(offer: Offer) -> None:
    """Raise MisuseError for an option that the constructor does not have, as far as its source shows."""
    target = offer.component.target_name
    if has_fixed_options(target):
        names = [option.name for option in constructor_options(target)]
        try:
            check_names(names, offer.options, target.rpartition(":")[2])
        except MisuseError as error:
            raise MisuseError(f"{offer.title}: {error}") from None


def _option_text(option: ConstructorOption) -> str:
    return " ".join(filter(None, (option.help, option.type and f"({option.type})")))


def _guide(offer: Offer) -> str:
    """Return the file or the page with the guide to a component's distribution; empty if there is none."""
    try:
        installed = distribution(offer.owner)
    except PackageNotFoundError:  # registered by a program
        return ""
    origin = origin_of(offer.owner)
    readme = Path(unquote(urlsplit(origin.get("url", "")).path)) / "README.md"
    if "dir_info" in origin and readme.is_file():
        return str(readme)
    pages = [url.partition(", ") for url in installed.metadata.get_all("Project-URL") or ()]
    pages.sort(key=lambda page: page[0].lower() != "documentation")
    if pages:
        return str(pages[0][2])
    return "" if origin else f"https://pypi.org/project/{offer.owner}/"


def _strategy_lines(component: Component) -> Iterable[tuple[str, str]]:
    yield "accelerators", ", ".join(component.accelerators) or "any"
    yield "device types", ", ".join(component.device_types) or "any"
    yield "collectives", _fact_text(component.uses_torch_distributed, "through torch.distributed", "its own, or none")
    yield "precisions", ", ".join(component.precisions) or "any"
    yield "devices", _devices(component)
    yield "processes", _fact_text(component.starts_processes, "one per device", "one")
    yield "machines", _fact_text(component.multi_node, "several", "one")
    yield "notebooks", _fact_text(component.notebook_safe, "yes", "no")


def _devices(component: Component) -> str:
    if component.max_devices is not None:
        return f"at most {component.max_devices}"
    if component.starts_processes or component.drives_several_devices:
        return "any number"
    return _fact_text(component.drives_several_devices, "any number", "one")


def _accelerator_lines(component: Component) -> Iterable[tuple[str, str]]:
    yield "device type", component.device_type or _UNDECLARED
    yield "collectives", _collectives(component)
    yield "devices", _fact_text(component.devices_share_process, "several in a process", "one in each process")
    yield "strategies", ", ".join(f"{other} for {alias}" for alias, other in component.strategies.items())


def _collectives(component: Component) -> str:
    backend = component.process_group_backend
    if backend is None or backend == NO_BACKEND:
        return backend or _UNDECLARED
    through = {True: ", through torch.distributed", False: ", not through torch.distributed", None: ""}
    return f"{backend}{through[component.supports_torch_distributed]}"


def _fact_text(fact: bool | None, yes: str, no: str) -> str:
    """Return a text for a fact."""
    if fact is None:
        return _UNDECLARED
    return yes if fact else no


# ``dstrat plugins``: the installed plugins, their state, and the reason for it


_NOT_PRINTED = ("components", "tombstones", "adapters")  # objects; what they offer is printed by alias


@click.command(short_help="List the installed plugins.")
@json_option
@click.option("--traceback", "show_tracebacks", is_flag=True, help="Print the tracebacks of failed plugins.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool, show_tracebacks: bool) -> None:
    """List the installed plugins; exit with 1 if one of them does not work."""
    installed = loaded_catalog().plugins
    if as_json:
        print_json({"plugins": [_plugin_as_dict(plugin) for plugin in installed]})
    else:
        print_table(
            [
                (plugin.label, plugin.entry_point, plugin.state, f"{plugin.seconds * 1000:.1f}", _remark(plugin))
                for plugin in installed
            ],
            ["distribution", "entry point", "state", "ms", "what it offers, or why not"],
        )
        for plugin in installed:
            if show_tracebacks and plugin.traceback:
                click.echo(f"\n{plugin.label}, {plugin.value}:\n{plugin.traceback}")
    ctx.exit(1 if any(plugin.is_broken for plugin in installed) else 0)


def _remark(plugin: Plugin) -> str:
    """Return the numbers of components that a plugin offers, or the reason why it offers none."""
    if plugin.state != "loaded":
        return plugin.reason
    counts: dict[str, int] = {}
    for component in plugin.components:
        counts[component.kind] = counts.get(component.kind, 0) + 1
    if plugin.adapters:
        counts["adapter"] = len(plugin.adapters)
    offered = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())).replace("_", " ") or "nothing"
    heavy = "; it imports torch, which makes every listing slow" if plugin.imported_torch else ""
    return f"{offered}{heavy}"


def _plugin_as_dict(plugin: Plugin) -> dict[str, Any]:
    shown = {field.name: getattr(plugin, field.name) for field in fields(plugin) if field.name not in _NOT_PRINTED}
    return {
        **shown,
        "offers": [{"kind": component.kind, "alias": component.alias} for component in plugin.components],
        "retired": [
            {"kind": stone.kind, "alias": stone.alias, "replacement": stone.replacement} for stone in plugin.tombstones
        ],
    }
