"""Finding out whether the main module can be run a second time."""

from __future__ import annotations

import sys
from pathlib import Path


def is_interactive() -> bool:
    """Return whether this is a notebook or a prompt: there is no script that another process could run or import."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules or not _has_script()


def _has_script() -> bool:
    path = getattr(sys.modules["__main__"], "__file__", None)  # "<stdin>" for what is piped in
    return path is not None and Path(path).is_file()
