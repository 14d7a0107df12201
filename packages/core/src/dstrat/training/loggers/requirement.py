"""Asking for the library that a feature works through."""

from __future__ import annotations

from importlib.util import find_spec

from dstrat.errors import MissingRequirementError
from dstrat.plugins.known import pip_command


def require(library: str, feature: str, *, extra: str | None = None) -> None:
    """Check that a library is installed, without importing it.

    Args:
        library: The module to import.
        feature: What needs it.
        extra: The extra of dstrat that brings it; by default of the library's name.

    Raises:
        MissingRequirementError: It is not.
    """
    if find_spec(library) is None:
        raise MissingRequirementError(
            f"{feature} needs {library}, which is not installed: {pip_command(f'dstrat[{extra or library}]')}"
        )
