"""From what a user asks to what will run, and from there to live objects.

Names are resolved on first use, so that a request can be written down without loading any of the parts.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dstrat.resolve.plan import Choice as Choice
    from dstrat.resolve.plan import Plan as Plan
    from dstrat.resolve.processes import is_interactive as is_interactive
    from dstrat.resolve.request import Request as Request
    from dstrat.resolve.resolve import build as build
    from dstrat.resolve.resolve import make_plan as make_plan

_HOMES = {
    "Choice": "dstrat.resolve.plan",
    "Plan": "dstrat.resolve.plan",
    "Request": "dstrat.resolve.request",
    "build": "dstrat.resolve.resolve",
    "is_interactive": "dstrat.resolve.processes",
    "make_plan": "dstrat.resolve.resolve",
}

__all__ = ["Choice", "Plan", "Request", "build", "is_interactive", "make_plan"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
