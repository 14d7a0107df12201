"""Messages of jsonargparse in one line, with the nearest names."""

# jsonargparse reports problems as texts only, which these patterns parse.  A text that none of them matches is shown as
# it is.

from __future__ import annotations

import re
from importlib import import_module
from typing import TYPE_CHECKING

from dstrat.plugins.settings import nearest
from dstrat.training.arguments import RETIRED_ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterable

_KEY = re.compile(r'Parser key "([^"]+)"')
_CLASS = re.compile(r"Problem with given class_path '([^']+)'")
_VALUE = re.compile(r"Given value: (.*)|Got value: (.*)")
_NESTED_VALUE = re.compile(r"NestedArg\(key='([^']+)', val=(.*)\)")
_TYPE = re.compile(r"Expected a (?:<class '([^']+)'>|((?:typing\.)?\w+\[.*\]))")
_UNKNOWN_OPTION = re.compile(
    r"unrecognized arguments: (.*)|does not accept option '([^']+)'|Key '([^']+)' is not expected"
)
_REQUIRED = re.compile(r"arguments are required: (.*)")


def explain(message: str, options: Iterable[str]) -> str:
    """Return a message of jsonargparse in one line, with the nearest names; an unknown one as it is.

    Args:
        message: The message, with a line for each possible type of an argument.
        options: The existing options, such as ``--trainer.devices``.
    """
    if unknown := _UNKNOWN_OPTION.search(message):
        return _unknown_option(*filter(None, unknown.groups()), options=options)
    if required := _REQUIRED.search(message):
        return _missing_options(required[1].split(", "), _CLASS.findall(message))
    keys = _KEY.findall(message)
    if not keys:
        return message
    nested = _NESTED_VALUE.search(message)
    if nested and keys[-1].rpartition(".")[2] != nested[1]:
        keys.append(nested[1])  # the argument of the class, which the key alone does not name
    problem = _class_problem(message) or _type_problem(message)
    return f"--{'.'.join(keys)}: {problem}" if problem else re.sub(rf"^{_KEY.pattern}", r"--\1", message)


def _missing_options(names: list[str], classes: list[str]) -> str:
    if classes:
        return f"{classes[-1]} needs {', '.join(map(repr, names))}, and got no value"
    names = [re.sub(r"^(fit|validate|test|predict)\.", "", name) for name in names]
    return f"{', '.join(f'--{name}' for name in names)} must be given: a value, or the path of a class; see --help"


def _unknown_option(text: str, *, options: Iterable[str]) -> str:
    name = re.split(r"[ =]", text.removeprefix("--"))[0]
    if not text.startswith("-") and "." not in text:
        return f"{text!r} is not understood: write options as --name=value"
    if (successor := RETIRED_ARGUMENTS.get(name.removeprefix("trainer."))) and name.startswith("trainer."):
        return f"there is no option --{name}: {successor}"
    names = [option.removeprefix("--") for option in options]
    near = nearest(name, names) or nearest(name.partition(".")[0], names)
    meant = f": did you mean {' or '.join(f'--{other}' for other in near)}?" if near else "; --help lists all"
    return f"there is no option --{name}{meant}"


def _class_problem(message: str) -> str:
    """Return the problem of a class or its arguments; empty if there is none."""
    classes = _CLASS.findall(message)
    if match := re.search(r"Option '([^']+)' is not accepted", message):
        return f"{classes[-1]} has no argument {match[1]!r}{_suggestion(match[1], _arguments(classes[-1]))}"
    if match := re.search(r"module '([^']+)' has no attribute '([^']+)'", message):
        return f"module {match[1]} has no class {match[2]!r}{_suggestion(match[2], dir(import_module(match[1])))}"
    if match := re.search(r"No module named '([^']+)'", message):
        return f"there is no module {match[1]!r}: it is neither installed nor in the folder where the program started"
    if match := re.search(r"Import path (\S+ )?does not correspond to a subclass of (.+)", message):
        value = match[1] or next(filter(None, _VALUE.findall(message)[-1]), "")
        return f"{value.strip()} is not a {match[2]}"
    if match := re.search(r"Expected a dot import path string: (\S+)", message):
        homes = [import_module(f"dstrat.{home}") for home in ("callbacks", "loggers", "profilers")]
        near = _suggestion(match[1], [name for home in homes for name in dir(home)])
        return f"no class has the name {match[1]!r}{near or ': write its path, as package.module.Class'}"
    return ""


def _type_problem(message: str) -> str:
    """Return a value with its possible types; empty if the message does not have them."""
    # Of nested types, the line with the value itself is the most specific one.
    innermost = next((line for line in message.splitlines() if "Got value: " in line), message)
    types = dict.fromkeys(filter(None, (name for match in _TYPE.findall(innermost) for name in match)))
    values = [first or second for first, second in _VALUE.findall(innermost)]
    if not types or not values:
        return ""
    nested = _NESTED_VALUE.search(values[-1])
    value = nested[2] if nested else values[-1]
    names = [name.removeprefix("typing.") if "[" in name else name.rpartition(".")[2] for name in types]
    plain = {"NoneType": "null", "str": "text", "Sequence": "a list"}
    readable = [re.sub(r"^Literal\[(.*)\]$", r"one of \1", plain.get(name, name)) for name in names]
    return f"{value} is not {' or '.join(readable)}"


def _arguments(path: str) -> list[str]:
    """Return the arguments of a class, with those that its ``**kwargs`` pass on."""
    from jsonargparse import ArgumentParser

    module, _, name = path.rpartition(".")
    added = ArgumentParser().add_class_arguments(getattr(import_module(module), name), "of", fail_untyped=False)
    return [argument.partition(".")[2] for argument in added]


def _suggestion(name: str, candidates: Iterable[str]) -> str:
    near = nearest(name, [candidate for candidate in candidates if not candidate.startswith("_")])
    return f": did you mean {' or '.join(map(repr, near))}?" if near else ""
