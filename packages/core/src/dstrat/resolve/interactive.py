"""Detection of a main module that cannot be run a second time: a notebook, a prompt, a test runner."""

from __future__ import annotations

import sys
from pathlib import Path

_RUNNERS = {"_pytest.": "pytest", "unittest.case": "unittest"}


def is_interactive() -> bool:
    """Return whether this is a notebook or a prompt: there is no script that another process could run or import."""
    return hasattr(sys, "ps1") or "ipykernel" in sys.modules or not _has_script()


def test_runner() -> str | None:
    """Return what runs the test that calls this function, ``"pytest"`` or ``"unittest"``; None outside of tests.

    It is found on the stack: a script that a test has started, or one that only imports pytest, is a script.
    """
    frame = sys._getframe()  # noqa: SLF001 - traceback.walk_stack would resolve each frame's source
    found = None
    while frame.f_back is not None:
        frame = frame.f_back
        module = frame.f_globals.get("__name__") or ""
        found = next((runner for prefix, runner in _RUNNERS.items() if module.startswith(prefix)), found)
    return found


def _has_script() -> bool:
    path = getattr(sys.modules["__main__"], "__file__", None)  # "<stdin>" for what is piped in
    return path is not None and Path(path).is_file()
