"""``dstrat plugins``: every plugin that is installed, its state, and the reason for it."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from dstrat.cli.catalog import loaded_catalog
from dstrat.cli.output import json_option, print_json, print_table

if TYPE_CHECKING:
    from dstrat.plugins.offer import Plugin

_NOT_PRINTED = ("components", "tombstones")


@click.command(short_help="List the installed plugins.")
@json_option
@click.option("--traceback", "show_tracebacks", is_flag=True, help="Print where the failed ones failed.")
@click.pass_context
def plugins(ctx: click.Context, as_json: bool, show_tracebacks: bool) -> None:
    """List the installed plugins; exit with 1 if one of them does not work."""
    found = loaded_catalog().plugins
    if as_json:
        print_json({"plugins": [_as_dict(plugin) for plugin in found]})
    else:
        print_table(
            [
                (plugin.label, plugin.entry_point, plugin.state, _milliseconds(plugin), remark(plugin))
                for plugin in found
            ],
            ["distribution", "entry point", "state", "ms", "what it offers, or why not"],
        )
        for plugin in found:
            if show_tracebacks and plugin.traceback:
                click.echo(f"\n{plugin.label}, {plugin.value}:\n{plugin.traceback}")
    ctx.exit(1 if any(plugin.is_broken for plugin in found) else 0)


def remark(plugin: Plugin) -> str:
    """Return what there is to say about a plugin in one line."""
    if plugin.state != "loaded":
        return plugin.reason
    counts: dict[str, int] = {}
    for component in plugin.components:
        counts[component.kind] = counts.get(component.kind, 0) + 1
    offered = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items())).replace("_", " ") or "nothing"
    heavy = "; it imports torch, which makes every listing slow" if plugin.imported_torch else ""
    return f"{offered}{heavy}"


def _milliseconds(plugin: Plugin) -> str:
    return f"{plugin.seconds * 1000:.1f}"


def _as_dict(plugin: Plugin) -> dict[str, Any]:
    shown = {field.name: getattr(plugin, field.name) for field in fields(plugin) if field.name not in _NOT_PRINTED}
    return {
        **shown,
        "offers": [{"kind": component.kind, "alias": component.alias} for component in plugin.components],
        "retired": [
            {"kind": stone.kind, "alias": stone.alias, "replacement": stone.replacement} for stone in plugin.tombstones
        ],
    }
