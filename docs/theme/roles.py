"""Brings the docstrings, whose markup is that of Sphinx, into Markdown while the site is built."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from griffe import Extension

if TYPE_CHECKING:
    from griffe import Object

_ROLE = re.compile(r":\w+:`~?(?P<name>[^`]+)`")
_LITERAL = re.compile(r"::$", re.MULTILINE)


class Roles(Extension):  # type: ignore[misc]  # griffe is not in the environment of mypy
    """Writes ``:meth:`setup``` as the name alone, and the two colons before an indented block as one."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        """Change the docstring of whatever was found."""
        if obj.docstring is not None:
            text = _ROLE.sub(lambda role: f"`{role['name'].removeprefix('dstrat.')}`", obj.docstring.value)
            obj.docstring.value = _LITERAL.sub(":", text)
