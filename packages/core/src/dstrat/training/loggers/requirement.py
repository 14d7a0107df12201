"""Asking for the library that a logger writes through."""

from __future__ import annotations

from importlib.util import find_spec

from dstrat.errors import MissingRequirementError
from dstrat.plugins.known import pip_command


def require(library: str, logger: str) -> None:
    """Check that a library is installed, without importing it; the extra of dstrat has its name.

    Raises:
        MissingRequirementError: It is not.
    """
    if find_spec(library) is None:
        raise MissingRequirementError(
            f"{logger} needs {library}, which is not installed: {pip_command(f'dstrat[{library}]')}"
        )
