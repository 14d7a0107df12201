"""Loading one plugin: import its module, call its hook, and check what it returns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pluggy

from dstrat.errors import InvalidComponentError
from dstrat.plugins import hookspec
from dstrat.plugins.component import Component, Tombstone

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

    from pluggy import HookimplOpts, HookspecOpts

_HOOK = "dstrat_components"


class _PluginManager(pluggy.PluginManager):
    """Passes over the names that every module has, which halves the time that loading a plugin takes."""

    def parse_hookimpl_opts(self, plugin: Any, name: str) -> HookimplOpts | None:
        return None if name.startswith("__") else super().parse_hookimpl_opts(plugin, name)

    def parse_hookspec_opts(self, module_or_class: Any, name: str) -> HookspecOpts | None:
        return None if name.startswith("__") else super().parse_hookspec_opts(module_or_class, name)


def load_records(entry_point: EntryPoint) -> tuple[tuple[Component, ...], tuple[Tombstone, ...]]:
    """Return what the plugin behind the entry point offers and has retired.

    Raises:
        InvalidComponentError: What it returned breaks the contract.
        pluggy.PluginValidationError: It implements a hook that does not exist, or in another shape.
        Exception: Whatever the plugin raises itself.
    """
    records = _call_hook(entry_point.load())
    components = tuple(record for record in records if isinstance(record, Component))
    tombstones = tuple(record for record in records if isinstance(record, Tombstone))
    _check_unique([*components, *tombstones])
    return components, tombstones


def _call_hook(plugin: Any) -> list[Component | Tombstone]:
    manager = _PluginManager("dstrat")
    manager.add_hookspecs(hookspec)
    manager.register(plugin)
    manager.check_pending()  # finds misspelt hooks, which pluggy would otherwise never call
    hook = manager.hook.dstrat_components
    if not hook.get_hookimpls():
        marked = " without marking it with @hookimpl" if hasattr(plugin, _HOOK) else ""
        verb = "defines" if marked else "does not implement"
        raise InvalidComponentError(f"it {verb} {_HOOK}{marked}")
    results = hook()
    return _checked_records(results[0] if results else None)


def _checked_records(returned: Any) -> list[Component | Tombstone]:
    if not isinstance(returned, list | tuple):
        raise InvalidComponentError(f"{_HOOK} returned {_shortened(returned)}, not a list of Component records")
    for record in returned:
        if not isinstance(record, Component | Tombstone):
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
