"""Fast exit of processes: handlers run and output is written, but the interpreter is not torn down."""

import subprocess
import sys

PRELOADED = """
import atexit, os

class Torn:
    def __del__(self, write=os.write):
        write(1, b"torn down\\n")

torn = Torn()
atexit.register(print, "handler")
"""

PROGRAM = """
import multiprocessing, sys

def work():
    sys.exit(3)

if __name__ == "__main__":
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*sys.argv[1:], "preloaded"])
    process = context.Process(target=work)
    process.start()
    process.join()
    print("code", process.exitcode, flush=True)
"""


def run_with_preload(folder, *names):
    (folder / "preloaded.py").write_text(PRELOADED)
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", *names]
    return subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True, timeout=60).stdout.split(
        "\n"
    )


def test_fork_server_exits_without_teardown_and_its_children_keep_their_codes(tmp_path):
    lines = run_with_preload(tmp_path, "dstrat.launch.fork_server")
    assert [line for line in lines if line] == ["code 3", "handler"]


def test_teardown_of_a_fork_server_is_seen(tmp_path):
    assert "torn down" in run_with_preload(tmp_path)
