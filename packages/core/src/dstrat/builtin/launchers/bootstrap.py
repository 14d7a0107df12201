"""What a fresh interpreter runs to become a rank.

It is run as a file, with the job's folder, the supervisor's process id, and what to do: a script or a module with its
arguments, or a function.  Nothing of the user's is imported before the rank is set up.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_HERE = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - nothing may be imported from this folder
if sys.path[0] == _HERE:  # Python's option -P leaves it out
    del sys.path[0]


def main() -> None:
    """Become the rank that the command line describes."""
    folder, parent, kind, target, *arguments = sys.argv[1:]
    _set_path(kind, target)
    from dstrat.builtin.launchers import leaving

    leaving.leave_quickly_at_exit()
    from pathlib import Path

    from dstrat.builtin.launchers import rank

    rank.enter_rank(Path(folder), runs_script=kind != "function", parent=int(parent))
    code = rank.exit_code_of(Path(folder), lambda: _run(Path(folder), kind, target, arguments))
    leaving.set_exit_code(code)
    sys.exit(code)


def _set_path(kind: str, target: str) -> None:
    """Set ``sys.path`` as Python does for a script or a module, and let dstrat be found.

    dstrat comes last and is missing only where the script itself extends the path to it.
    """
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, os.path.dirname(target) if kind == "script" else os.getcwd())  # noqa: PTH109, PTH120
    root = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 3))  # noqa: PTH100, PTH118 - as above
    if root not in sys.path:
        sys.path.append(root)


def _run(folder: Path, kind: str, target: str, arguments: list[str]) -> None:
    import json
    import runpy

    from dstrat.builtin.launchers import history, rank

    if kind == "function":
        rank.run_function(folder, json.loads(target))
        return
    history.load(folder)
    sys.argv[:] = [target, *arguments]
    if kind == "script":
        runpy.run_path(target, run_name="__main__")
    else:
        runpy.run_module(target, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
