"""Finding the record that already describes a class, so that registering it anew need not repeat its facts."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.plugins.catalog import Catalog
    from dstrat.plugins.component import Component, Kind


def inherited_record(catalog: Catalog, kind: Kind, cls: type, arguments: Mapping[str, Any]) -> Component | None:
    """Return the record of the class, or of the nearest of its bases that has one; None where there is none.

    Of several records of one class, the one whose preset arguments are the most of those given is taken: a strategy
    that is registered with ``start_method="fork"`` has the facts of its family's alias for fork.
    """
    records = [offer.component for offer in catalog.offers(kind)]
    for base in cls.__mro__:
        of_base = [record for record in records if is_target(record.target, base)]
        if of_base:
            return max(of_base, key=lambda record: _agreement(record.options, arguments))
    return None


def is_target(target: str | type, cls: type) -> bool:
    """Return whether a record's target is that class."""
    if not isinstance(target, str):
        return target is cls
    module, _, name = target.partition(":")
    if name != cls.__name__ or module not in sys.modules:
        return False
    return getattr(sys.modules[module], name, None) is cls


def _agreement(options: Mapping[str, Any], arguments: Mapping[str, Any]) -> int:
    """Count the options that are given too; fewer than none where one is not given."""
    agreeing = sum(
        bool(type(arguments.get(key)) is type(value) and arguments[key] == value) for key, value in options.items()
    )
    return agreeing if agreeing == len(options) else agreeing - len(options)
