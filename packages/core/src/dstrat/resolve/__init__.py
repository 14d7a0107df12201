"""Resolution of requests: from what the user asks for to a plan and a composed strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.exports import lazy_exports

if TYPE_CHECKING:
    from dstrat.resolve.plan import Plan as Plan
    from dstrat.resolve.plan import PlanRow as PlanRow
    from dstrat.resolve.processes import is_interactive as is_interactive
    from dstrat.resolve.request import Request as Request
    from dstrat.resolve.resolve import make_plan as make_plan
    from dstrat.resolve.resolve import resolve_request as resolve_request

_HOMES = {
    "Plan": "dstrat.resolve.plan",
    "PlanRow": "dstrat.resolve.plan",
    "Request": "dstrat.resolve.request",
    "is_interactive": "dstrat.resolve.processes",
    "make_plan": "dstrat.resolve.resolve",
    "resolve_request": "dstrat.resolve.resolve",
}

if not TYPE_CHECKING:  # on first use, so that importing a request loads nothing else
    __getattr__, __dir__ = lazy_exports(__name__, _HOMES)
