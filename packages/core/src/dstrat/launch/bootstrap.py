"""Bootstrap of a fresh interpreter that becomes a rank.

It runs as a file, with the job's folder, the supervisor's process id, and the program: a script or a module with its
arguments, or a function.  No user code is imported before the rank is set up, so that an error of the user's imports
is reported as that of this rank.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

# Python puts the folder of the file that it runs first on sys.path, where the user's imports would find our modules:
# command, job, task ...  So little is imported before it is removed.
_OUR_FOLDER = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 - pathlib would be such an import
if sys.path[0] == _OUR_FOLDER:  # absent with Python's option -P
    del sys.path[0]


def main() -> None:
    """Set up the rank that the command line describes, and run its program."""
    folder, parent, kind, *command = sys.argv[1:]
    _set_path(os.path.dirname(command[0]) if kind == "script" else os.getcwd())  # noqa: PTH109, PTH120 - as above
    from dstrat.launch import fast_exit

    fast_exit.leave_quickly_at_exit()  # before any import that may register a handler, see that module
    from pathlib import Path

    from dstrat.launch import rank

    rank.enter_rank(Path(folder), runs_script=kind != "function", parent=int(parent))
    code = rank.exit_code_of(Path(folder), lambda: _run(Path(folder), kind, command))
    fast_exit.set_exit_code(code)
    sys.exit(code)  # not os._exit: Python waits for the program's threads, then runs the handlers of atexit


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
    external.history.load(folder)
    target, *sys.argv[:] = command  # the same list, of which modules may have a reference
    if kind == "script":
        _run_script(target)
    else:
        import runpy

        runpy.run_module(target, run_name="__main__", alter_sys=True)


def _run_script(path: str) -> None:
    """Run a script in a new module ``__main__``."""
    from importlib.machinery import SourceFileLoader
    from types import ModuleType

    # Not by runpy.run_path, which restores the previous __main__ at the end: threads and exit handlers of the script
    # still need theirs, where pickle finds its classes.
    loader = SourceFileLoader("__main__", path)
    module = ModuleType("__main__")
    module.__file__ = path
    module.__loader__ = loader
    sys.modules["__main__"] = module
    exec(loader.source_to_code(loader.get_data(path), path), module.__dict__)  # noqa: S102 - it is the user's script


if __name__ == "__main__":
    main()
