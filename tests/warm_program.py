"""Scripts that run as programs of their own, in copies of the warm fork server, which has imported torch already."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.printed import without_gloo

if TYPE_CHECKING:
    from collections.abc import Mapping

WITHOUT_DSTRAT = """
import sys
for name in [name for name in sys.modules if name.startswith("dstrat")]:
    del sys.modules[name]
"""
"""The beginning of a script that tells what of dstrat is imported: a warm process has imported most of it."""


class WarmProgram:
    """A script that runs, as ``subprocess.Popen`` would show it.  Processes that it starts anew are not warm.

    Args:
        script: The file, which is run as ``__main__`` in its folder.
        *arguments: What ``sys.argv`` has beside it.
        environ: Variables of its environment, beside those of the warm process.
    """

    def __init__(self, script: Path, *arguments: str, environ: Mapping[str, str] | None = None) -> None:
        context = multiprocessing.get_context("forkserver")
        (out, write_out), (err, write_err) = context.Pipe(duplex=False), context.Pipe(duplex=False)
        self._process = context.Process(target=_run, args=(str(script), arguments, write_out, write_err, environ or {}))
        self._process.start()
        write_out.close()
        write_err.close()
        self.stdout, self._stderr = _reader(out), _reader(err)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it has ended, and the fork server has taken notice before us
            os.kill(self._process.pid, number)

    def run(self, timeout: float = 300.0) -> str:
        """Return what it printed, after it has ended well."""
        out, err = self.communicate(timeout)
        assert self.returncode == 0, err
        return out

    def communicate(self, timeout: float = 300.0) -> tuple[str, str]:
        """Wait for the end; return what was printed since, which is little."""
        self._process.join(timeout)
        if self._process.exitcode is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            printed = self.stdout.read() + self._stderr.read()
            raise TimeoutError(f"the program has not ended in {timeout:.0f} s: {printed}")
        with self.stdout, self._stderr:
            return without_gloo(self.stdout.read()), self._stderr.read()

    def next_lines(self, count: int) -> list[str]:
        """Return the next lines that it prints."""
        lines: list[str] = []
        while len(lines) < count and (line := self.stdout.readline()):
            lines += without_gloo(line).splitlines(keepends=True)
        return lines


def _reader(connection: Any) -> Any:
    with connection:
        return os.fdopen(os.dup(connection.fileno()), encoding="utf-8")


def _run(script: str, arguments: tuple[str, ...], out: Any, err: Any, environ: Mapping[str, str]) -> None:
    gc.freeze()  # a search for garbage would visit, and so copy, all that the fork server has loaded
    os.setsid()
    os.environ.update(environ)
    os.dup2(out.fileno(), 1)
    os.dup2(err.fileno(), 2)
    out.close()
    err.close()
    import torch

    torch.set_num_threads(1)
    folder = str(Path(script).parent)
    os.chdir(folder)
    sys.path[:0] = [folder, *filter(None, environ.get("PYTHONPATH", "").split(os.pathsep))]  # read at a start of Python
    sys.argv = [script, *arguments]
    # What a rank of start_method="popen" is made from.
    sys.orig_argv = [sys.executable, *sys.argv]
    multiprocessing.process.ORIGINAL_DIR = folder
    try:
        runpy.run_path(script, run_name="__main__")
    except KeyboardInterrupt:  # as Python itself ends then
        traceback.print_exc()
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
