"""The arguments of constructors: those of the calls that are running now, and those that a class accepts."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.training.module.plain_values import type_hints

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)

_FRAMEWORK = ("dstrat", "torch", "builtins")


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """A running call of an ``__init__``.

    Attributes:
        named: Its arguments by name, those in ``**kwargs`` too.
        unnamed: The arguments in ``*args``.
    """

    named: dict[str, Any]
    unnamed: tuple[Any, ...]


def running_calls(owner: object, frame: FrameType | None) -> list[Call]:
    """Return the calls of an object's constructors that are running, that of a base class before its subclass's.

    Args:
        owner: The object that is being constructed.
        frame: Where to begin looking outwards.
    """
    return [_call_of(found) for found in _outwards(frame) if _constructs(found, owner)]


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _constructs(frame: FrameType, owner: object) -> bool:
    code = frame.f_code
    return code.co_name == "__init__" and code.co_argcount > 0 and frame.f_locals.get(code.co_varnames[0]) is owner


def _call_of(frame: FrameType) -> Call:
    names, args, kwargs, values = inspect.getargvalues(frame)
    named = {name: values[name] for name in names[1:] if name in values}
    return Call(
        named=named | (values.get(kwargs, {}) if kwargs else {}),
        unnamed=tuple(values.get(args, ())) if args else (),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Constructor:
    """What a class takes to be constructed.

    Attributes:
        required: Names of the arguments without which it cannot be constructed.
        names: Names of all arguments, those that ``**kwargs`` hands on to base classes too.
        takes_any: Whether it takes arguments of any other name.
        annotations: The types of the arguments by name, as far as they can be found.
        defaults: The values of the arguments that have one.
    """

    required: tuple[str, ...]
    names: tuple[str, ...]
    takes_any: bool
    annotations: dict[str, Any]
    defaults: dict[str, Any]

    @classmethod
    def of(cls, constructed: type) -> Constructor:
        """Return what a class takes."""
        required: tuple[str, ...] | None = None
        names: dict[str, None] = {}
        annotations: dict[str, Any] = {}
        defaults: dict[str, Any] = {}
        takes_any = False
        for init in _inits(constructed):
            parameters = list(inspect.signature(init).parameters.values())[1:]
            names |= {parameter.name: None for parameter in parameters if parameter.kind in _NAMED}
            annotations = type_hints(init) | annotations
            defaults = {p.name: p.default for p in parameters if p.default is not p.empty} | defaults
            if required is None:  # a base class's are given by its subclass
                required = tuple(p.name for p in parameters if p.kind in _NAMED and p.default is p.empty)
            takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
            if not takes_any:
                break
        return cls(
            required=required or (),
            names=tuple(names),
            takes_any=takes_any,
            annotations=annotations,
            defaults=defaults,
        )


def _inits(constructed: type) -> list[Any]:
    """Return the constructors that users have written, a subclass's first.

    Those below take none of the users' arguments: what ``**kwargs`` has there is read by the user's class itself.
    """
    written = (base for base in constructed.__mro__ if base.__module__.partition(".")[0] not in _FRAMEWORK)
    return [base.__dict__["__init__"] for base in written if "__init__" in base.__dict__]
