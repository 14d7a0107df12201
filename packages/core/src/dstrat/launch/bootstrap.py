"""Bootstrap of a fresh interpreter that becomes a rank.

It runs as a file, with the job's folder, the supervisor's process id, and the program: a script or a module with its
arguments, or a function.  No user code is imported before the rank is set up.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - with this folder on sys.path nothing may be imported yet
if sys.path[0] == _OUR_FOLDER:  # absent with Python's option -P
    del sys.path[0]


def main() -> None:
    """Set up the rank that the command line describes, and run its program."""
    folder, parent, kind, *command = sys.argv[1:]
    _set_path(os.path.dirname(command[0]) if kind == "script" else os.getcwd())  # noqa: PTH109, PTH120 - as above
    from dstrat.launch import fast_exit

    fast_exit.leave_quickly_at_exit()
    from pathlib import Path

    from dstrat.launch import rank

    rank.enter_rank(Path(folder), runs_script=kind != "function", parent=int(parent))
    code = rank.exit_code_of(Path(folder), lambda: _run(Path(folder), kind, command))
    fast_exit.set_exit_code(code)
    sys.exit(code)


def _set_path(first: str) -> None:
    """Set ``sys.path`` as Python does for a script or a module, with dstrat's folder last.

    That folder is missing only if the script itself extends the path to it.
    """
    if not (sys.flags.isolated or getattr(sys.flags, "safe_path", False)):
        sys.path.insert(0, first)
    root = os.path.abspath(os.path.join(_OUR_FOLDER, *[os.pardir] * 2))  # noqa: PTH100, PTH118 - as above
    if root not in sys.path:
        sys.path.append(root)


def _run(folder: Path, kind: str, command: list[str]) -> None:
    from dstrat.launch import external, rank

    if kind == "function":
        rank.run_function(folder)
        return
    external.load(folder)
    target, *sys.argv[:] = command
    if kind == "script":
        _run_script(target)
    else:
        import runpy

        runpy.run_module(target, run_name="__main__", alter_sys=True)


def _run_script(path: str) -> None:
    """Run a script in a new module ``__main__`` that lives, unlike that of runpy, until the process ends."""
    from importlib.machinery import SourceFileLoader
    from types import ModuleType

    loader = SourceFileLoader("__main__", path)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = loader
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(path), path), module.__dict__)  # noqa: S102 - it is the user's script


if __name__ == "__main__":
    main()
