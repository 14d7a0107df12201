"""Discovery of installed plugins: each is loaded separately, and a broken one is data, not an exception."""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, replace
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, distribution, distributions
from typing import TYPE_CHECKING, Any

import pluggy

from dstrat.errors import InvalidComponentError
from dstrat.plugins import component
from dstrat.plugins.component import ENTRY_POINT_GROUP, Adapter, Component, Tombstone
from dstrat.plugins.offer import Plugin, named_import
from dstrat.plugins.settings import DISABLE, PluginSettings, normalized

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from pluggy import HookimplOpts, HookspecOpts


_SLOW_IMPORT = 10.0  # seconds; a plugin takes milliseconds


def discover(settings: PluginSettings) -> tuple[Plugin, ...]:
    """Find and load the plugins of all installed distributions.

    The order depends on names only: distribution, entry point, value.
    """
    declarations = sorted(read_declarations(), key=lambda declaration: normalized(declaration.name))
    plugins = (plugin for declaration in declarations for plugin in _plugins_of(declaration, settings))
    return tuple(_reject_repetitions(plugins))


def _plugins_of(declaration: Declaration, settings: PluginSettings) -> Iterator[Plugin]:
    if declaration.problem is not None:
        yield _failed(_declared(declaration, EntryPoint("?", "?", ENTRY_POINT_GROUP)), declaration.problem)
    supported = [entry for entry in declaration.entry_points if entry.group == ENTRY_POINT_GROUP]
    for entry in supported or declaration.entry_points:
        yield _load_if_enabled(_declared(declaration, entry), entry, settings)


def _declared(declaration: Declaration, entry: EntryPoint) -> Plugin:
    return Plugin(
        distribution=declaration.name,
        version=declaration.version,
        entry_point=entry.name,
        group=entry.group,
        value=entry.value,
        state="loaded",
    )


def _load_if_enabled(plugin: Plugin, entry: EntryPoint, settings: PluginSettings) -> Plugin:
    if normalized(plugin.distribution) in settings.disabled:
        return replace(plugin, state="disabled", reason=f"named by {DISABLE}")
    if plugin.group != ENTRY_POINT_GROUP:
        reason = f"it is written for {plugin.group}, and this dstrat has {ENTRY_POINT_GROUP}: upgrade the older one"
        return replace(plugin, state="unsupported", reason=reason)
    return _load(plugin, entry)


def _load(plugin: Plugin, entry: EntryPoint) -> Plugin:
    had_torch = "torch" in sys.modules
    started = time.perf_counter()
    try:
        with named_import(plugin.value, plugin.distribution, seconds=_SLOW_IMPORT):
            records = load_records(entry)
        outcome = replace(
            plugin,
            components=tuple(record for record in records if isinstance(record, Component)),
            tombstones=tuple(record for record in records if isinstance(record, Tombstone)),
            adapters=tuple(record for record in records if isinstance(record, Adapter)),
        )
    except (Exception, SystemExit) as error:  # noqa: BLE001 - any error of a third-party module is data about it
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
    """Mark a plugin as failed whose distribution offers an alias twice: ``alias@distribution`` must be unique."""
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
            yield replace(plugin, state="failed", reason=reason, components=(), tombstones=(), adapters=())


# Distributions that declare plugins
#
# ``importlib.metadata.entry_points()`` is not used: one malformed line in the metadata of any distribution makes it
# raise for all of them, and it parses the entry points of all installed distributions.


_FILE = "entry_points.txt"
_GROUP_PREFIX = "dstrat."  # of every version of the API: a plugin for another one is reported, not ignored


@dataclass(frozen=True, kw_only=True, slots=True)
class Declaration:
    """A distribution that declares plugins.

    Attributes:
        name: Its name.
        version: Its version.
        entry_points: The entry points in groups of dstrat, in the order of group, name and value.
        problem: Why they cannot be read; None when they can.
    """

    name: str
    version: str
    entry_points: tuple[EntryPoint, ...] = ()
    problem: Exception | None = None


def read_declarations() -> Iterator[Declaration]:
    """Yield the distributions that declare plugins, each once, in no particular order."""
    seen: set[str] = set()
    for candidate in distributions():
        if not _declares_plugins(candidate):
            continue
        name, _ = _name_and_version(candidate)
        if name not in seen:
            seen.add(name)
            active = _first_on_path(name)
            if active is None:
                yield _declaration(candidate)
            elif _declares_plugins(active):
                yield _declaration(active)


def _declares_plugins(candidate: Distribution) -> bool:
    try:
        return f"[{_GROUP_PREFIX}" in (candidate.read_text(_FILE) or "")  # parsing would take several times as long
    except (OSError, ValueError):  # unreadable
        return False


def _first_on_path(name: str) -> Distribution | None:
    """Return the distribution that an import would use, if several versions are on the path."""
    try:
        return distribution(name)
    except PackageNotFoundError:  # its folder has another name than its metadata
        return None


def _declaration(candidate: Distribution) -> Declaration:
    name, version = _name_and_version(candidate)
    try:
        entries = [entry for entry in candidate.entry_points if entry.group.startswith(_GROUP_PREFIX)]
    except Exception as error:  # noqa: BLE001 - malformed text raises TypeError or other things, by version of Python
        return Declaration(name=name, version=version, problem=error)
    entries.sort(key=lambda entry: (entry.group, entry.name, entry.value))
    return Declaration(name=name, version=version, entry_points=tuple(entries))


def _name_and_version(candidate: Distribution) -> tuple[str, str]:
    """Read both from the header; ``Distribution.metadata`` parses the whole text as an e-mail each time."""
    text = candidate.read_text("METADATA") or candidate.read_text("PKG-INFO") or ""
    header = dict(line.split(": ", 1) for line in text.partition("\n\n")[0].splitlines() if ": " in line)
    return header.get("Name", "unknown"), header.get("Version", "")


# Loading of one plugin: import of its module, call of its hook, check of the records


_HOOK = "dstrat_components"


class _PluginManager(pluggy.PluginManager):
    """Plugin manager that skips the dunder names of modules, which halves the time to load a plugin."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> HookimplOpts | None:
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> HookspecOpts | None:
        return None if name.startswith("__") else super().parse_hookspec_opts(module_or_class, name)


def load_records(entry_point: EntryPoint) -> list[Component | Tombstone | Adapter]:
    """Return the records of an entry point's plugin.

    Raises:
        InvalidComponentError: Its hook returned something else.
        pluggy.PluginValidationError: It implements a hook that does not exist, or with other arguments.
        Exception: Any error of the plugin.
    """
    records = _call_hook(entry_point.load())
    _check_unique([record for record in records if not isinstance(record, Adapter)])
    return records


def _call_hook(plugin: Any) -> list[Component | Tombstone | Adapter]:
    manager = _PluginManager("dstrat")
    manager.add_hookspecs(component)
    manager.register(plugin)
    manager.check_pending()  # finds misspelt hooks, which pluggy would otherwise never call
    hook = manager.hook.dstrat_components
    if not hook.get_hookimpls():
        marked = " without marking it with @hookimpl" if hasattr(plugin, _HOOK) else ""
        verb = "defines" if marked else "does not implement"
        raise InvalidComponentError(f"it {verb} {_HOOK}{marked}")
    results = hook()
    return _checked_records(results[0] if results else None)


def _checked_records(returned: Any) -> list[Component | Tombstone | Adapter]:
    if not isinstance(returned, list | tuple):
        raise InvalidComponentError(f"{_HOOK} returned {_shortened(returned)}, not a list of Component records")
    for record in returned:
        if not isinstance(record, Component | Tombstone | Adapter):
            raise InvalidComponentError(f"{_HOOK} returned {_shortened(record)} in its list, not a Component record")
    return list(returned)


def _check_unique(records: list[Component | Tombstone]) -> None:
    seen: set[tuple[str, str]] = set()
    for record in records:
        for name in (record.alias, *getattr(record, "synonyms", ())):
            if (record.kind, name) in seen:
                raise InvalidComponentError(f"{_HOOK} returned {record.kind} {name!r} twice")
            seen.add((record.kind, name))


def _shortened(value: object, limit: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
