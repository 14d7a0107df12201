"""Finding every installed plugin and loading each on its own, so that a broken one is data and not an exception."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from importlib.metadata import EntryPoint
from typing import TYPE_CHECKING

from dstrat.plugins.declarations import Declaration, read_declarations
from dstrat.plugins.hookspec import ENTRY_POINT_GROUP
from dstrat.plugins.loading import load_records
from dstrat.plugins.names import normalized
from dstrat.plugins.offer import Plugin
from dstrat.plugins.settings import DISABLE, PluginSettings
from dstrat.plugins.slow_import import named_import

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

_SLOW_IMPORT = 10.0  # seconds; a plugin takes milliseconds


def discover(settings: PluginSettings) -> tuple[Plugin, ...]:
    """Find and load the plugins of all installed distributions.

    The order depends on names only: distribution, entry point, value.
    """
    declarations = sorted(read_declarations(), key=lambda found: normalized(found.name))
    plugins = (plugin for found in declarations for plugin in _plugins_of(found, settings))
    return tuple(_reject_repetitions(plugins))


def _plugins_of(found: Declaration, settings: PluginSettings) -> Iterator[Plugin]:
    if found.problem is not None:
        yield _failed(_declared(found, EntryPoint("?", "?", ENTRY_POINT_GROUP)), found.problem)
    spoken = [entry for entry in found.entry_points if entry.group == ENTRY_POINT_GROUP]
    for entry in spoken or found.entry_points:
        yield _judged(_declared(found, entry), entry, settings)


def _declared(found: Declaration, entry: EntryPoint) -> Plugin:
    return Plugin(
        distribution=found.name,
        version=found.version,
        entry_point=entry.name,
        group=entry.group,
        value=entry.value,
        state="loaded",
    )


def _judged(plugin: Plugin, entry: EntryPoint, settings: PluginSettings) -> Plugin:
    if normalized(plugin.distribution) in settings.disabled:
        return replace(plugin, state="disabled", reason=f"named by {DISABLE}")
    if plugin.group != ENTRY_POINT_GROUP:
        reason = f"it speaks {plugin.group}, and this dstrat speaks {ENTRY_POINT_GROUP}: upgrade the older of the two"
        return replace(plugin, state="unsupported", reason=reason)
    return _loaded(plugin, entry)


def _loaded(plugin: Plugin, entry: EntryPoint) -> Plugin:
    had_torch = "torch" in sys.modules
    started = time.perf_counter()
    try:
        with named_import(plugin.value, plugin.distribution, seconds=_SLOW_IMPORT):
            components, tombstones = load_records(entry)
        outcome = replace(plugin, components=components, tombstones=tombstones)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a stranger's module does is data about it
        outcome = _failed(plugin, error)
    return replace(
        outcome,
        seconds=time.perf_counter() - started,
        imported_torch="torch" in sys.modules and not had_torch,
    )


def _failed(plugin: Plugin, error: BaseException) -> Plugin:
    import traceback

    text = " ".join(str(error).split())
    reason = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return replace(plugin, state="failed", reason=reason, traceback="".join(traceback.format_exception(error)))


def _reject_repetitions(plugins: Iterable[Plugin]) -> Iterator[Plugin]:
    """Let a distribution offer an alias once: ``alias@distribution`` must name one thing."""
    offered: dict[tuple[str, str, str], str] = {}
    for plugin in plugins:
        owner = normalized(plugin.distribution)
        names = [(owner, c.kind, name) for c in plugin.components for name in (c.alias, *c.synonyms)]
        repeated = next((key for key in names if key in offered), None)
        if repeated is None:
            offered.update(dict.fromkeys(names, plugin.entry_point))
            yield plugin
        else:
            _, kind, name = repeated
            reason = f"it repeats {kind} {name!r} of entry point {offered[repeated]!r} of the same distribution"
            yield replace(plugin, state="failed", reason=reason, components=(), tombstones=())
