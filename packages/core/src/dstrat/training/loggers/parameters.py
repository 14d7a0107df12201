"""Settings and values of a run in the shapes that loggers write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dstrat.training.module.plain_values import fields_of


def as_mapping(params: Any) -> Mapping[str, Any]:
    """Return the settings, which may be a mapping, a namespace or a dataclass, by name."""
    fields = fields_of(params)
    return vars(params) if fields is None else fields


def flatten(params: Any) -> dict[str, Any]:
    """Return the settings without nesting, as ``outer/inner``."""
    flat: dict[str, Any] = {}
    for name, value in as_mapping(params).items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": deeper for inner, deeper in flatten(value).items()}
        else:
            flat[str(name)] = value
    return flat


def as_numbers(metrics: Mapping[str, Any], prefix: str = "", separator: str = "-") -> dict[str, Any]:
    """Return values with a prefix before their names; tensors, which users log, as numbers."""
    start = f"{prefix}{separator}" if prefix else ""
    return {f"{start}{name}": value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
