"""Finding out whether the main module can be run a second time."""

from __future__ import annotations

import sys


def is_interactive() -> bool:
    """Return whether this is a notebook or a prompt: no script that another process could run or import."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules or not hasattr(sys.modules["__main__"], "__file__")
