"""Programs in processes of their own, which are copies of one that has loaded torch and dstrat, and no simulator."""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SECONDS = 170


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        return (self.stdout or self.stderr).strip().splitlines()[-1]


def run(program: str, **environ: str | None) -> Ended:
    """Run a program, with the environment of this process and these variables; None removes one.

    It begins where torch has just been imported, plugins included: the simulator, unless lazy mode keeps torch from it.
    """
    wanted = {name: value for name, value in {**os.environ, **environ}.items() if value is not None}
    server = _server()
    server.stdin.write(json.dumps([program, wanted]) + "\n")
    server.stdin.flush()
    answer = server.stdout.readline()
    assert answer, "the process that others are copies of has ended"
    return Ended(*json.loads(answer))


@cache
def _server() -> subprocess.Popen[str]:
    environ = {**os.environ, "PT_HPU_AUTOLOAD": "0", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    server = subprocess.Popen(
        [sys.executable, __file__], env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server


def _serve() -> None:
    import torch  # noqa: F401 - what the copies begin with

    import dstrat_hpu.accelerator  # noqa: F401 - as above

    for line in sys.stdin:
        program, environ = json.loads(line)
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = os.fork()
            if child == 0:
                _become(program, environ, out.fileno(), err.fileno())
            _, status = os.waitpid(child, 0)
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read())
        print(json.dumps([os.waitstatus_to_exitcode(status), *texts]), flush=True)


def _become(program: str, environ: dict[str, str], out: int, err: int) -> None:
    """Run the program in place of this process."""
    import torch

    code = 1
    try:
        os.dup2(out, 1)
        os.dup2(err, 2)
        os.environ.clear()
        os.environ.update(environ)
        sys.path[:0] = [entry for entry in environ.get("PYTHONPATH", "").split(os.pathsep) if entry]
        if not environ.get("PYTHONPATH"):
            sys.path[:] = [entry for entry in sys.path if not (Path(entry) / "habana_frameworks").exists()]
        elif environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD") != "0":
            torch._import_device_backends()  # which importing torch does
        exec(compile(program, "<program>", "exec"), {"__name__": "__main__"})
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
