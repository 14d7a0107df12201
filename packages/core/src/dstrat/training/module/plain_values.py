"""Plain values of hyperparameters: conversion for loggers and checkpoints, and back."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import numbers
import sys
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable, Mapping
from enum import Enum
from fractions import Fraction
from pathlib import Path, PurePath
from types import MappingProxyType, SimpleNamespace, UnionType
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

    Paths become strings, and members of an Enum their values; namespaces, dataclasses and containers of omegaconf
    become dicts and lists.

    Args:
        value: The value.
        name: Name of the value; its items are called ``name.key`` and ``name[index]``.
        otherwise: Returns a replacement for the name and value of an item that is not plain.
    """
    plain = value.value if isinstance(value, Enum) else value
    # A float would round a Fraction.
    if plain is None or (isinstance(plain, bool | str | PurePath | numbers.Real) and not isinstance(plain, Fraction)):
        return _plain_scalar(plain)
    if is_container(value):
        omegaconf = sys.modules["omegaconf"]
        try:
            return to_plain(omegaconf.OmegaConf.to_container(value, resolve=True), name, otherwise)
        except omegaconf.errors.OmegaConfBaseException:  # an interpolation cannot be resolved
            return otherwise(name, value)
    if isinstance(plain, list | tuple):
        items = [to_plain(item, f"{name}[{index}]", otherwise) for index, item in enumerate(plain)]
        return tuple(items) if isinstance(plain, tuple) else items
    fields = fields_of(plain)
    if fields is not None and all(isinstance(key, str) for key in fields):
        return {key: to_plain(item, f"{name}.{key}" if name else key, otherwise) for key, item in fields.items()}
    return otherwise(name, value)


def _plain_scalar(value: Any) -> Any:
    """Return a number or str of a subclass, such as numpy's, as Python's own."""
    if value is None or isinstance(value, bool):
        return value
    # numpy's numbers are registered with these abstract classes.
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return str.__str__(value) if isinstance(value, str) else str(value)


def from_plain(
    value: Any, annotation: Any = None, name: str = "", types: Mapping[str, str] = MappingProxyType({})
) -> Any:
    """Return plain values in their original types; without annotation and type a dict is an :class:`AttributeDict`.

    Args:
        value: The plain value.
        annotation: The annotation of the argument, which precedes the recorded types other than dict.
        name: Name of the value, as for :func:`to_plain`.
        types: The result of :func:`standard_types`.
    """
    classes = _classes_of(annotation)
    standard = _STANDARD.get(types.get(name, ""))
    if isinstance(value, Mapping):
        annotated = None if standard is dict else next(filter(_has_fields, classes), None)
        recorded = standard if standard not in (Path, dict) else None
        cls: Any = annotated or recorded or AttributeDict
        hints = type_hints(cls) if dataclasses.is_dataclass(cls) else {}
        of_items = _annotation_of_items(annotation, dict, -1)
        return cls(
            **{
                key: from_plain(item, hints.get(key, of_items), _item_name(name, key), types)
                for key, item in value.items()
            }
        )
    if isinstance(value, list | tuple):
        is_tuple = isinstance(value, tuple) or (tuple in classes and list not in classes)
        kind = tuple if is_tuple else list
        items = [
            from_plain(item, _annotation_of_items(annotation, kind, index), f"{name}[{index}]", types)
            for index, item in enumerate(value)
        ]
        named = next((cls for cls in classes if issubclass(cls, tuple) and hasattr(cls, "_fields")), None)
        return kind(items) if named is None else named(*items)
    if value is None or type(value) in classes:
        return value
    enums = [one for one in classes if issubclass(one, Enum)]
    if enums:
        return enums[0](value)
    is_path = standard is Path or any(issubclass(one, PurePath) for one in classes)
    return Path(value) if isinstance(value, str) and is_path else value


def _item_name(name: str, key: str) -> str:
    return f"{name}.{key}" if name else key


def _members_of(annotation: Any) -> tuple[Any, ...]:
    return get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)


def _classes_of(annotation: Any) -> list[type]:
    """Return the classes that an annotation allows: int and list of ``int | list[str]``."""
    classes = (get_origin(member) or member for member in _members_of(annotation))
    return [member for member in classes if inspect.isclass(member)]


def _annotation_of_items(annotation: Any, kind: type, index: int) -> Any:
    """Return the annotation of an item of a container: ``Block`` of ``list[Block]``; None if there is none."""
    for member in _members_of(annotation):
        origin, arguments = get_origin(member), get_args(member)
        if not inspect.isclass(origin) or not (issubclass(kind, origin) or issubclass(origin, kind)):
            continue
        if kind is not dict and (origin is not tuple or arguments[1:] == (...,)):
            index = 0  # the items of a list, or of a Sequence, have the same annotation
        return arguments[index] if -len(arguments) <= index < len(arguments) else None
    return None


# Types that plain values lack


_STANDARD: dict[str, Any] = {cls.__name__: cls for cls in (Path, Namespace, SimpleNamespace, OrderedDict, dict)}
"""The types that a checkpoint records by name: a closed list, since it must not choose what is constructed.

A dict is recorded since the annotation may be a dataclass: it comes back as an :class:`AttributeDict`.
"""


def standard_types(value: Any, name: str) -> dict[str, str]:
    """Return the type of each item that is a path, a namespace or a dict, by the name of the item."""
    if is_container(value):
        return {}
    types = {name: next((kind for kind, cls in _STANDARD.items() if isinstance(value, cls)), "")}
    for item_name, item in _items_of(value, name):
        types |= standard_types(item, item_name)
    return {item_name: kind for item_name, kind in types.items() if kind}


def _items_of(value: Any, name: str) -> list[tuple[str, Any]]:
    if isinstance(value, list | tuple):
        return [(f"{name}[{index}]", item) for index, item in enumerate(value)]
    return [(_item_name(name, key), item) for key, item in (fields_of(value) or {}).items()]


def changed_items(value: Any, restored: Any, name: str) -> dict[str, Any]:
    """Return the items of a value that have another type after they were converted and restored, by name.

    Args:
        value: The value.
        restored: The result of :func:`from_plain`; None if it failed.
        name: Name of the value.
    """
    if is_container(value):
        return {}
    if restored is None and value is not None:
        return {name: value}
    # Of other subclasses only the methods are lost: numpy's numbers become Python's, and a CfgNode becomes a dict.
    # A defaultdict or a Counter has values for all keys, which a dict has not.
    has_fields = hasattr(value, "_fields") or hasattr(value, "__missing__") or _has_fields(type(value))
    if (has_fields or isinstance(value, Enum | PurePath)) and not isinstance(restored, type(value)):
        return {name: value}
    items, restored_items = _items_of(value, name), dict(_items_of(restored, name))
    if [item_name for item_name, _ in items] != list(restored_items):  # a __post_init__ may have added some
        return {name: value}
    changed: dict[str, Any] = {}
    for item_name, item in items:
        changed |= changed_items(item, restored_items[item_name], item_name)
    return changed


def _has_fields(cls: type) -> bool:
    return dataclasses.is_dataclass(cls) or issubclass(cls, Namespace | SimpleNamespace)


def type_hints(annotated: Any) -> dict[str, Any]:
    """Return the annotations of a class or a function; an empty dict if one of them cannot be resolved."""
    try:
        return get_type_hints(annotated)
    except Exception:  # noqa: BLE001 - annotations may use names that are imported under TYPE_CHECKING
        return {}
