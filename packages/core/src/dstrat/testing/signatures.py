"""Constructor arguments of a class, including inherited ones."""

from __future__ import annotations

import inspect
from typing import Any


def constructor_parameters(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """Return the parameters of each ``__init__`` that a class has or inherits, by name."""
    return {
        name: parameter
        for base in reversed(cls.__mro__[:-1])
        if "__init__" in vars(base)
        for name, parameter in inspect.signature(vars(base)["__init__"]).parameters.items()
        if name != "self"
    }
