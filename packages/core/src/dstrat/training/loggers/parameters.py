"""The settings of a run in the shapes that loggers can write."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any


def as_mapping(params: Any) -> Mapping[str, Any]:
    """Return the settings, which may be a mapping, a namespace or a dataclass, by name."""
    if isinstance(params, Mapping):
        return params
    if dataclasses.is_dataclass(params) and not isinstance(params, type):
        return {field.name: getattr(params, field.name) for field in dataclasses.fields(params)}
    named: Mapping[str, Any] = vars(params)
    return named


def flatten(params: Any) -> dict[str, Any]:
    """Return the settings without nesting, as ``outer/inner``."""
    flat: dict[str, Any] = {}
    for name, value in as_mapping(params).items():
        if isinstance(value, Mapping):
            flat |= {f"{name}/{inner}": deeper for inner, deeper in flatten(value).items()}
        else:
            flat[str(name)] = value
    return flat
