"""Docstring and constructor of a class, read from source without an import."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import lru_cache
from importlib.machinery import PathFinder
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from importlib.machinery import ModuleSpec

# Importing the class would import torch, and may fail where its backend is not installed.

_ITEM = re.compile(r"(\*{0,2}\w+): (.*)")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstructorOption:
    """An argument of a constructor that has a default.

    Attributes:
        name: Its name.
        default: Its default as Python code.
        type: Its annotation as Python code; empty without one.
        help: Its text in the docstring of the class; empty without one.
    """

    name: str
    default: str
    type: str
    help: str


def first_line(target: str) -> str:
    """Return the first line of the docstring of ``"package.module:Class"``; empty if its source has none."""
    cls = _definition(*target.split(":", 1))
    return "" if cls is None else _docstring(cls[1]).partition("\n")[0]


def constructor_options(target: str) -> list[ConstructorOption]:
    """Return the options of the constructor of ``"package.module:Class"``, which may be that of a base class."""
    return [option for module, cls, arguments in _constructors(target) for option in _options(module, cls, arguments)]


def has_fixed_options(target: str) -> bool:
    """Return whether the constructor of ``"package.module:Class"`` is known, and takes no further keywords."""
    constructors = [arguments for _, _, arguments in _constructors(target)]
    return bool(constructors) and all(arguments.kwarg is None for arguments in constructors)


def _constructors(target: str) -> Iterator[tuple[str, ast.ClassDef, ast.arguments]]:
    """Yield the constructor of a class, and that of its base if the first passes its arguments on."""
    for module, cls in _with_bases(*target.split(":", 1)):
        for node in cls.body:
            if isinstance(node, ast.FunctionDef) and node.name == "__init__":
                yield module, cls, node.args
                if node.args.vararg is None:
                    return


def _options(module: str, cls: ast.ClassDef, arguments: ast.arguments) -> Iterator[ConstructorOption]:
    positional = [*arguments.posonlyargs, *arguments.args]
    required = len(positional) - len(arguments.defaults)
    defaults = [*zip(positional[required:], arguments.defaults, strict=True)]
    texts = _argument_texts(_docstring(cls))
    for argument, default in (*defaults, *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)):
        if default is not None:
            yield ConstructorOption(
                name=argument.arg,
                default=_code(module, default),
                type="" if argument.annotation is None else ast.unparse(argument.annotation).strip("'\""),
                help=texts.get(argument.arg, ""),
            )


def _argument_texts(docstring: str) -> dict[str, str]:
    """Return the texts below ``Args:`` by the names of the arguments."""
    texts: dict[str, str] = {}
    name = ""
    for line in docstring.partition("\nArgs:\n")[2].split("\n"):
        if line and not line.startswith(" "):  # the next section
            break
        if line.startswith("    ") and (match := _ITEM.fullmatch(line[4:])):
            name = match[1]
            texts[name] = match[2]
        elif name and line.strip():
            texts[name] += f" {line.strip()}"
    return {name: text.replace("``", "").replace("  ", " ") for name, text in texts.items()}


def _code(module: str, default: ast.expr) -> str:
    """Return the code of a default, or that of the constant that it names."""
    if (
        isinstance(default, ast.Name)
        and (definition := _lookup(module, default.id))
        and isinstance(definition[1], ast.Assign)
    ):
        return ast.unparse(definition[1].value)
    return ast.unparse(default)


def _docstring(cls: ast.ClassDef) -> str:
    return ast.get_docstring(cls) or ""


# Definitions, also those that a module imports from another one


def _with_bases(module: str, name: str) -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield a class and its bases by their modules: its own, its first base with the bases of that one, and so on."""
    definition = _definition(module, name)
    if definition is not None:
        yield definition
        for base in definition[1].bases:
            if isinstance(base, ast.Name):
                yield from _with_bases(definition[0], base.id)


def _definition(module: str, name: str) -> tuple[str, ast.ClassDef] | None:
    definition = _lookup(module, name)
    return (
        (definition[0], definition[1]) if definition is not None and isinstance(definition[1], ast.ClassDef) else None
    )


def _lookup(module: str, name: str) -> tuple[str, ast.stmt] | None:
    """Return the statement that defines a name, and its module; None if it is not found."""
    for node in _statements(module):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return module, node
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            return module, node
        if isinstance(node, ast.ImportFrom) and node.module and not node.level and node.module != module:
            original = next((alias.name for alias in node.names if name == (alias.asname or alias.name)), None)
            if original is not None:
                return _lookup(node.module, original)
    return None


@lru_cache
def _statements(module: str) -> list[ast.stmt]:
    """Return the statements of a module; none if its source is not there."""
    try:
        return ast.parse(_source(module) or "").body
    except (ImportError, OSError, SyntaxError, ValueError):  # an error for a user of the class, not of a listing
        return []


def _source(module: str) -> str | None:
    """Return the source of a module; None if it is not found."""
    # Not importlib.util.find_spec, which imports the packages above the module.
    spec: ModuleSpec | None = None
    names = module.split(".")
    for depth in range(1, len(names) + 1):
        path = None if spec is None else spec.submodule_search_locations
        spec = PathFinder.find_spec(".".join(names[:depth]), path)
        if spec is None:
            return None
    loader = spec.loader if spec is not None else None
    source: str | None = loader.get_source(module) if loader is not None and hasattr(loader, "get_source") else None
    return source
