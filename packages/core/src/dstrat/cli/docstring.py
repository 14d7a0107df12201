"""Reading the first line of a class's docstring from its source, without importing anything."""

from __future__ import annotations

import ast
from importlib.machinery import ModuleSpec, PathFinder


def first_line(target: str) -> str:
    """Return the first line of the docstring of ``"package.module:Class"``; empty where the source does not tell."""
    module, _, name = target.partition(":")
    try:
        source = _source(module)
        tree = ast.parse(source or "")
    except (ImportError, OSError, SyntaxError, ValueError):  # whoever uses the class will hear of it
        return ""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            return (ast.get_docstring(node) or "").partition("\n")[0]
    return ""


def _source(module: str) -> str | None:
    """Return the source of a module; ``importlib.util.find_spec`` would import the packages that it lies in."""
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        path = None if spec is None else spec.submodule_search_locations
        spec = PathFinder.find_spec(".".join(parts[:depth]), path)
        if spec is None:
            return None
    loader = spec.loader if spec is not None else None
    source: str | None = loader.get_source(module) if loader is not None and hasattr(loader, "get_source") else None
    return source
