"""Options of an alias: ``"fsdp(cpu_offload=True)"``, and names of a constructor's arguments."""

from __future__ import annotations

import ast
import inspect
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.plugins.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

_MOST_LISTED = 12
_NONE: Mapping[str, Any] = MappingProxyType({})
_OTHER_LANGUAGES = {"true": "True", "false": "False", "null": "None", "none": "None"}  # as in YAML and JSON
_EXAMPLE = "'alias(count=2, name=\"text\")'"


@dataclass(frozen=True, kw_only=True, slots=True)
class AliasText:
    """Text by which a user selects a component.

    Attributes:
        alias: The alias, or a synonym or group.
        owner: The distribution after ``@``; None without one.
        options: The arguments in parentheses, which are literals.
    """

    alias: str
    owner: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)


def parse_alias(text: str) -> AliasText:
    """Parse ``"alias"``, ``"alias@distribution"`` or either with ``"(option=literal, ...)"``; nothing is evaluated.

    Raises:
        RequestError: The options cannot be understood.
    """
    name, parenthesis, rest = text.partition("(")
    alias, at, owner = name.strip().partition("@") if parenthesis else name.partition("@")
    options = _parse_options(text, rest) if parenthesis else {}
    return AliasText(alias=alias, owner=owner if at else None, options=options)


def options_text(options: Mapping[str, Any]) -> str:
    """Return options as they follow an alias: ``"(cpu_offload=True)"``; empty without any."""
    return f"({', '.join(f'{name}={value!r}' for name, value in options.items())})" if options else ""


def _parse_options(text: str, rest: str) -> dict[str, Any]:
    problem = f"{text!r} is not understood"
    if rest.rpartition(")")[2].lstrip().startswith("@"):
        raise RequestError(f"{problem}: write the options last, as in 'alias@distribution(count=2)'")
    try:
        call = ast.parse(f"alias({rest.strip()}", mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else type(error).__name__
        raise RequestError(f"{problem} ({reason}): write options as in {_EXAMPLE}") from None
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name)):
        raise RequestError(f"{problem}: the options end the text, as in {_EXAMPLE}")
    if call.args or any(keyword.arg is None for keyword in call.keywords):
        raise RequestError(f"{problem}: each option has its name, as in {_EXAMPLE}")
    options: dict[str, Any] = {}
    for keyword in call.keywords:
        name = str(keyword.arg)
        if name in options:
            raise RequestError(f"{problem}: option {name!r} is there twice")
        try:
            options[name] = ast.literal_eval(keyword.value)
        except (ValueError, TypeError, MemoryError, RecursionError):
            raise RequestError(f"{problem}: {_not_literal(name, keyword.value)}") from None
    return options


def _not_literal(name: str, value: ast.expr) -> str:
    if isinstance(value, ast.Name):
        literal = _OTHER_LANGUAGES.get(value.id, repr(value.id))
        return f"{value.id} is no literal of Python, write {name}={literal}"
    return (
        f"{name}={ast.unparse(value)} is no literal, such as 2, True, 'text', (1, 2) or {{'key': 3}}; "
        "for other values construct the class, and give the instance"
    )


# Check against a constructor


def check_options(cls: type, title: str, options: Mapping[str, Any], presets: Mapping[str, Any]) -> None:
    """Check the options of an alias against the constructor of its class.

    Args:
        cls: The class.
        title: The component with its options, for messages.
        options: The options that the user wrote.
        presets: The arguments that the alias presets.

    Raises:
        MisuseError: The constructor has no such argument; the message has the nearest names.
        ConflictError: The alias presets a value that is not the default of its class.
    """
    parameters = inspect.signature(cls).parameters
    try:
        check_keywords(parameters.values(), options, cls.__name__)
    except MisuseError as error:
        raise MisuseError(f"{title}: {error}") from None
    for name in options.keys() & presets.keys():
        # A preset that is the default does not distinguish the alias; an attribute of the class may have the default.
        default = parameters[name].default if name in parameters else None
        if presets[name] not in (default, getattr(cls, name, None)):
            raise ConflictError(
                f"{title} gives the option {name!r} twice, as the alias presets {name}={presets[name]!r}: "
                "leave it out, or choose an alias that does not preset it"
            )


def check_keywords(
    parameters: Iterable[inspect.Parameter], keywords: Iterable[str], label: str, retired: Mapping[str, str] = _NONE
) -> None:
    """Check that a function accepts keyword arguments.

    Args:
        parameters: The parameters of the function.
        keywords: The names of the arguments.
        label: The function's name in the message.
        retired: The successors of retired arguments.

    Raises:
        MisuseError: It has no such argument; the message has the nearest names.
    """
    parameters = list(parameters)
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    check_names([parameter.name for parameter in parameters], keywords, label, retired)


def check_names(names: Sequence[str], keywords: Iterable[str], label: str, retired: Mapping[str, str] = _NONE) -> None:
    """Check keyword arguments by the names that exist; arguments and error are those of :func:`check_keywords`."""
    for keyword in keywords:
        if keyword not in names:
            raise MisuseError(_describe(keyword, names, label, retired))


def _describe(keyword: str, names: Sequence[str], label: str, retired: Mapping[str, str]) -> str:
    problem = f"{label} has no argument {keyword!r}"
    if keyword in retired:
        return f"{problem}: {retired[keyword]}"
    if near := nearest(keyword, names):
        return f"{problem}: did you mean {' or '.join(map(repr, near))}?"
    if len(names) > _MOST_LISTED:
        return f"{problem}: help({label}) lists all"
    return f"{problem}: it has {', '.join(names) or 'none'}"
