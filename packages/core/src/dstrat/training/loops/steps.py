"""Calling a step of the module with the arguments that it takes."""

from __future__ import annotations

import inspect
from typing import Any


def count_arguments(step: Any) -> int:
    """Return how many of (batch, index of the batch, index of the loader) a step takes."""
    parameters = inspect.signature(step).parameters.values()
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in parameters):
        return 3
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return min(3, sum(parameter.kind in positional for parameter in parameters))
