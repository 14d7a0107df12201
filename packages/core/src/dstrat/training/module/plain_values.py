"""Plain values of hyperparameters: conversion for loggers and checkpoints, and back."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import numbers
import sys
from argparse import Namespace
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path, PurePath
from types import SimpleNamespace, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints


class AttributeDict(dict[str, Any]):
    """A dict whose items are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:  # copy and pickle look up attributes that are absent, and expect an AttributeError
            keys = ", ".join(map(repr, self)) or "nothing"
            raise AttributeError(f"there is no {name!r}, only {keys}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


def is_container(value: Any) -> bool:
    """Return whether a value is a container of omegaconf, without importing omegaconf."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def to_container(plain: Any) -> Any:
    """Return plain values as a container of omegaconf; as :func:`from_plain` does if omegaconf is not installed."""
    if importlib.util.find_spec("omegaconf") is None:
        return from_plain(plain)
    import omegaconf  # type: ignore[import-not-found,unused-ignore]  # no environment of CI has to have it

    return omegaconf.OmegaConf.create(plain)


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return the items of a mapping, namespace or dataclass, by name; None for other values."""
    if is_container(value) and isinstance(value, Mapping):
        is_missing = sys.modules["omegaconf"].OmegaConf.is_missing  # reading a missing value raises
        return {key: value[key] for key in value if not is_missing(value, key)}
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, Namespace | SimpleNamespace):
        return dict(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def to_plain(value: Any, name: str, otherwise: Callable[[str, Any], Any]) -> Any:
    """Return a value as numbers, strings, None, lists, tuples and dicts.

    Paths become strings; namespaces, dataclasses and containers of omegaconf become dicts and lists.

    Args:
        value: The value.
        name: Name of the value; its items are called ``name.key`` and ``name[index]``.
        otherwise: Returns a replacement for the name and value of an item that is not plain.
    """
    if value is None or isinstance(value, bool | str | PurePath | numbers.Real):
        return _plain_scalar(value)
    if is_container(value):
        omegaconf = sys.modules["omegaconf"]
        try:
            return to_plain(omegaconf.OmegaConf.to_container(value, resolve=True), name, otherwise)
        except omegaconf.errors.OmegaConfBaseException:  # an interpolation cannot be resolved
            return otherwise(name, value)
    if isinstance(value, list | tuple):
        items = [to_plain(item, f"{name}[{index}]", otherwise) for index, item in enumerate(value)]
        return tuple(items) if isinstance(value, tuple) else items
    fields = fields_of(value)
    if fields is not None and all(isinstance(key, str) for key in fields):
        return {key: to_plain(item, f"{name}.{key}" if name else key, otherwise) for key, item in fields.items()}
    return otherwise(name, value)


def _plain_scalar(value: Any) -> Any:
    """Return a number or str of a subclass, such as numpy's or an Enum, as Python's own."""
    if value is None or isinstance(value, bool):
        return value
    # numpy's numbers are registered with these abstract classes.
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    # Not str(value), which is the name of an Enum's member.
    return str.__str__(value) if isinstance(value, str) else str(value)


def from_plain(value: Any, annotation: Any = None) -> Any:
    """Return plain values in the type of an annotation; without one a dict becomes an :class:`AttributeDict`."""
    classes = _classes_of(annotation)
    if isinstance(value, Mapping):
        cls = next(filter(_has_fields, classes), AttributeDict)
        hints = type_hints(cls) if dataclasses.is_dataclass(cls) else {}
        return cls(**{name: from_plain(item, hints.get(name)) for name, item in value.items()})
    if isinstance(value, list | tuple):
        items = [from_plain(item) for item in value]
        return tuple(items) if isinstance(value, tuple) or (tuple in classes and list not in classes) else items
    if value is None or type(value) in classes:
        return value
    enums = [one for one in classes if issubclass(one, Enum)]
    if enums:
        return enums[0](value)
    return Path(value) if isinstance(value, str) and any(issubclass(one, PurePath) for one in classes) else value


def _classes_of(annotation: Any) -> list[type]:
    """Return the classes that an annotation allows: int and list of ``int | list[str]``."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    classes = (get_origin(member) or member for member in members)
    return [member for member in classes if inspect.isclass(member)]


def _has_fields(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or issubclass(cls, Namespace | SimpleNamespace)


def type_hints(annotated: Any) -> dict[str, Any]:
    """Return the annotations of a class or a function; an empty dict if one of them cannot be resolved."""
    try:
        return get_type_hints(annotated)
    except Exception:  # noqa: BLE001 - annotations may use names that are imported under TYPE_CHECKING
        return {}
