"""Settings as plain values that any format holds, and the classes that come back from them."""

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
    """A dict whose keys are attributes too."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            known = ", ".join(map(repr, self)) or "nothing"
            raise AttributeError(f"there is no {name!r}, only {known}") from None

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __delattr__(self, name: str) -> None:
        del self[name]


def is_container(value: Any) -> bool:
    """Return whether a value is a container of omegaconf, which is not imported for that."""
    omegaconf = sys.modules.get("omegaconf")
    return omegaconf is not None and isinstance(value, omegaconf.Container)


def to_container(plain: Any) -> Any:
    """Return plain values as a container of omegaconf; where that is not installed as :func:`from_plain` does."""
    if importlib.util.find_spec("omegaconf") is None:
        return from_plain(plain)
    import omegaconf  # type: ignore[import-not-found,unused-ignore]  # no environment of CI has to have it

    return omegaconf.OmegaConf.create(plain)


def fields_of(value: Any) -> dict[str, Any] | None:
    """Return what a mapping, a namespace or a dataclass holds, by name; None for anything else."""
    if is_container(value) and isinstance(value, Mapping):
        is_missing = sys.modules["omegaconf"].OmegaConf.is_missing  # such a value cannot be read
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
        value: What to turn into plain values.
        name: What it is called; parts of it are called ``name.key`` and ``name[index]``.
        otherwise: Called with name and value of what is not plain; returns what stands for it.
    """
    if value is None or isinstance(value, bool | str | PurePath | numbers.Real):
        return _plain_scalar(value)
    if is_container(value):
        omegaconf = sys.modules["omegaconf"]
        try:
            return to_plain(omegaconf.OmegaConf.to_container(value, resolve=True), name, otherwise)
        except omegaconf.errors.OmegaConfBaseException:  # it refers to something that cannot be found
            return otherwise(name, value)
    if isinstance(value, list | tuple):
        parts = [to_plain(part, f"{name}[{index}]", otherwise) for index, part in enumerate(value)]
        return tuple(parts) if isinstance(value, tuple) else parts
    fields = fields_of(value)
    if fields is not None and all(isinstance(key, str) for key in fields):
        return {key: to_plain(part, f"{name}.{key}" if name else key, otherwise) for key, part in fields.items()}
    return otherwise(name, value)


def _plain_scalar(value: Any) -> Any:
    """Return a number or a string without its subclass, such as numpy's or an Enum."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, numbers.Real):
        return int(value) if isinstance(value, numbers.Integral) else float(value)
    return str.__str__(value) if isinstance(value, str) else str(value)


def from_plain(value: Any, annotation: Any = None) -> Any:
    """Return plain values as what an annotation says; without one dicts become an :class:`AttributeDict`."""
    wanted = _classes_of(annotation)
    if isinstance(value, Mapping):
        return _from_mapping(value, next(filter(_has_fields, wanted), AttributeDict))
    if isinstance(value, list | tuple):
        parts = [from_plain(part) for part in value]
        return tuple(parts) if isinstance(value, tuple) or (tuple in wanted and list not in wanted) else parts
    if value is None or type(value) in wanted:
        return value
    enums = [one for one in wanted if issubclass(one, Enum)]
    if enums:
        return enums[0](value)
    return Path(value) if isinstance(value, str) and any(issubclass(one, PurePath) for one in wanted) else value


def _classes_of(annotation: Any) -> list[type]:
    """Return the classes that an annotation allows: int and list of ``int | list[str]``."""
    members = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    found = (get_origin(member) or member for member in members)
    return [member for member in found if inspect.isclass(member)]


def _has_fields(wanted: type) -> bool:
    return dataclasses.is_dataclass(wanted) or issubclass(wanted, Namespace | SimpleNamespace)


def _from_mapping(value: Mapping[str, Any], wanted: type) -> Any:
    hints = type_hints(wanted) if dataclasses.is_dataclass(wanted) else {}
    return wanted(**{name: from_plain(part, hints.get(name)) for name, part in value.items()})


def type_hints(annotated: Any) -> dict[str, Any]:
    """Return the annotations of a class or a function; none where one of them cannot be found."""
    try:
        return get_type_hints(annotated)
    except Exception:  # noqa: BLE001 - annotations may name what was imported for type checkers alone
        return {}
