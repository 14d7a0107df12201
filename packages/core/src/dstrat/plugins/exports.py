"""Names of a module that are imported on first use, the classes of installed plugins among them."""

from __future__ import annotations

import gc
import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

from dstrat.errors import AmbiguousAliasError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from dstrat.plugins.component import Kind
    from dstrat.plugins.offer import Plugin


def lazy_exports(
    module: str, homes: Mapping[str, str], kinds: tuple[Kind, ...] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return the ``__getattr__`` and ``__dir__`` of a module whose names are imported on first use.

    ``__all__`` of the module consists of these names, and needs no definition.  Type checkers see none of this: declare
    the names under ``if TYPE_CHECKING``, and assign the two functions under its ``else``, so that checkers find typos.

    Args:
        module: The module, its ``__name__``.
        homes: For each name, the module that defines it; or ``"module:Name"`` where it has another name there.
        kinds: Classes of plugins that the module offers besides: those of these kinds, by class name.
    """

    def get(name: str) -> Any:
        if name == "__all__":
            return sorted({*homes, *_class_names(kinds)})
        if name in homes:
            value = _import(homes[name], name)
            setattr(sys.modules[module], name, value)
            return value
        # Names such as __wrapped__ are what inspect and pytest look for in any module.
        if kinds and not name.startswith("_"):
            cls = _find_class(kinds, name)
            if cls is not None:
                return cls
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    def names() -> list[str]:
        return sorted({*vars(sys.modules[module]), *sys.modules[module].__all__})

    return get, names


def _import(home: str, name: str) -> Any:
    module, _, attribute = home.partition(":")
    was_enabled = gc.isenabled()
    gc.disable()  # imported objects stay alive, and a collection among all objects of torch takes long
    try:
        return getattr(import_module(module), attribute or name)
    finally:
        if was_enabled:
            gc.enable()


def _class_names(kinds: tuple[Kind, ...]) -> set[str]:
    """Return the names of the classes of these kinds whose requirements are satisfied."""
    if not kinds:
        return set()
    from dstrat.plugins.catalog import get_catalog

    catalog = get_catalog()
    offers = [offer for kind in kinds for offer in catalog.offers(kind) if not catalog.missing_requirements(offer)]
    return {_class_name(offer.component.target) for offer in offers if isinstance(offer.component.target, str)}


def _find_class(kinds: tuple[Kind, ...], name: str) -> type[Any] | None:
    """Return the class of an installed plugin; None if no plugin is known to have it.

    Raises:
        AmbiguousAliasError: Several distributions have a class of that name.
        NotInstalledError: It belongs to a known distribution, which is not installed or does not work.
        CatalogError: It cannot be imported.
    """
    from dstrat.plugins.catalog import get_catalog
    from dstrat.plugins.not_found import class_miss

    catalog = get_catalog()
    offers = {
        offer.component.target: offer
        for kind in kinds
        for offer in catalog.offers(kind)
        if isinstance(offer.component.target, str) and _class_name(offer.component.target) == name
    }
    if len(offers) > 1:
        sources = " or ".join(f"from {target.partition(':')[0]} import {name}" for target in sorted(map(str, offers)))
        raise AmbiguousAliasError(f"class {name!r} is offered by several distributions: write {sources}")
    for offer in offers.values():
        return catalog.load(offer)
    cls = _exported_class(kinds, name, catalog.plugins)
    error = class_miss(kinds, name, catalog.plugins) if cls is None else None
    if error is not None:
        raise error
    return cls


def _exported_class(kinds: tuple[Kind, ...], name: str, plugins: tuple[Plugin, ...]) -> type[Any] | None:
    """Return the class from the ``__all__`` of a plugin's package: a base or a variant without an alias."""
    from dstrat.plugins.offer import is_of_kind

    for plugin in plugins:
        package = sys.modules.get(plugin.value.partition(":")[0].rpartition(".")[0])
        if plugin.state == "loaded" and name in getattr(package, "__all__", ()):
            cls: type[Any] = getattr(package, name)
            if any(is_of_kind(cls, kind) for kind in kinds):
                return cls
    return None


def _class_name(target: str) -> str:
    return target.partition(":")[2]
