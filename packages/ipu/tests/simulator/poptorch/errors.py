"""Errors of the simulator; in poptorch they come from C++ (graphcore/poptorch, python/poptorch.cpp)."""

from __future__ import annotations


class Error(RuntimeError):
    """A ``poptorch.Error`` with the name of its origin."""


def poptorch_error(message: str) -> Error:
    """Return an error as python/_impl.py's createPoptorchError makes one."""
    return Error(f"poptorch_py_error: {message}")
