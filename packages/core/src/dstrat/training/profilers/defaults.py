"""Profilers by their names in ``Trainer(profiler=...)``."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING

from dstrat.errors import RequestError
from dstrat.resolve.selection import counterpart_advice
from dstrat.training.profilers.profiler import Profiler

if TYPE_CHECKING:
    from typing import Any

_NAMES = ("simple", "advanced", "torch")


def make_profiler(requested: Any) -> Profiler | None:
    """Return the requested profiler; None for None.

    Args:
        requested: ``"simple"``, ``"advanced"``, ``"torch"`` (also ``"pytorch"``), a Profiler, or None.

    Raises:
        RequestError: The value is none of these.
    """
    if requested is None or isinstance(requested, Profiler):
        return requested
    if requested == "simple":
        from dstrat.training.profilers.simple import SimpleProfiler

        return SimpleProfiler()
    if requested == "advanced":
        from dstrat.training.profilers.advanced import AdvancedProfiler

        return AdvancedProfiler()
    if requested in ("torch", "pytorch"):
        from dstrat.training.profilers.torch_profiler import TorchProfiler

        return TorchProfiler()
    near = difflib.get_close_matches(requested, _NAMES, n=1) if isinstance(requested, str) else []
    hint = f" (did you mean {near[0]!r}?)" if near else counterpart_advice(type(requested), "dstrat.profilers")
    raise RequestError(
        f"profiler={requested!r} is not 'simple', 'advanced', 'torch', a Profiler (an instance, not a class) or "
        f"None{hint}"
    )
