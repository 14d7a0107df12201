"""Fast exit of processes: handlers run and output is written, but the interpreter is not torn down."""

import gzip
import os
import signal
import subprocess
import sys
import zipfile

import pytest

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
    context.set_forkserver_preload(sys.argv[1:])
    process = context.Process(target=work)
    process.start()
    process.join()
    print("code", process.exitcode, flush=True)
"""


def run_with_preload(folder, *names):
    (folder / "preloaded.py").write_text(PRELOADED)
    (folder / "program.py").write_text(PROGRAM)
    command = [sys.executable, "program.py", *names]
    return subprocess.run(command, check=True, cwd=folder, capture_output=True, text=True, timeout=400).stdout.split(
        "\n"
    )


def test_fork_server_exits_without_teardown_and_its_children_keep_their_codes(tmp_path):
    lines = run_with_preload(tmp_path, "dstrat.launch.fork_server", "preloaded", "dstrat.launch.fork_server_ready")
    assert [line for line in lines if line] == ["code 3", "handler"]


def test_teardown_of_a_fork_server_is_seen(tmp_path):
    assert "torn down" in run_with_preload(tmp_path, "preloaded")


FILES = """
import bz2, gzip, os, zipfile
from pathlib import Path

folder = Path(os.environ["FOLDER"])
text = open(folder / "text", "w")
binary = open(folder / "binary", "wb")
squeezed = gzip.open(folder / "squeezed", "wt")
archive = zipfile.ZipFile(folder / "archive", "w")

def write():
    text.write("text")
    binary.write(b"binary")
    squeezed.write("squeezed")
    archive.writestr("name", "archive")
"""


def read_files(folder):
    """Return what the program's files hold, without the archive, whose end a destructor writes."""
    assert (folder / "text").read_text() == "text"
    assert (folder / "binary").read_bytes() == b"binary"
    assert gzip.decompress((folder / "squeezed").read_bytes()) == b"squeezed"


def run_rank(folder, code):
    program = f"import sys; from dstrat.launch import fast_exit; fast_exit.leave_quickly_at_exit(); {FILES}{code}"
    environ = {**os.environ, "FOLDER": str(folder)}
    command = [sys.executable, "-c", program.replace("; \n", "\n")]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=400, check=False)


def test_files_that_the_program_left_open_are_written(tmp_path):
    done = run_rank(tmp_path, "write(); fast_exit.set_exit_code(0)")
    assert (done.returncode, done.stderr) == (0, "")
    read_files(tmp_path)
    assert zipfile.ZipFile(tmp_path / "archive").read("name") == b"archive"


def test_destructors_of_the_program_have_its_imports_and_constants(tmp_path):
    code = """
import json
HEADER = "rows"
class Report:
    def __init__(self):
        self.file = os.open(folder / "report", os.O_CREAT | os.O_WRONLY)
    def __del__(self):
        os.write(self.file, json.dumps([HEADER, 1]).encode())
report = Report()
fast_exit.set_exit_code(0)
"""
    done = run_rank(tmp_path, code)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "report").read_text() == '["rows", 1]'


OF_A_FUNCTION = """
def run():
    archive = globals().pop("archive")
    raise ValueError
run()
"""


@pytest.mark.parametrize("code", ["raise ValueError", OF_A_FUNCTION], ids=["global", "local"])
def test_archive_of_a_process_without_peers_is_complete_after_an_error(tmp_path, code):
    done = run_rank(tmp_path, f"write(); fast_exit.leave_quickly_if_uncaught(has_peers=False); {code}")
    assert done.returncode == 1
    read_files(tmp_path)
    assert zipfile.ZipFile(tmp_path / "archive").read("name") == b"archive"


def test_files_of_a_program_that_fails_are_written(tmp_path):
    done = run_rank(tmp_path, "write(); fast_exit.leave(5)")
    assert (done.returncode, done.stderr) == (5, "")
    read_files(tmp_path)


UNCAUGHT = """
import atexit, os, sys
from dstrat.launch.fast_exit import leave_quickly_if_uncaught

class Torn:
    def __del__(self, write=os.write):
        write(1, b"torn down")

torn = Torn()
atexit.register(print, "handler", flush=True)
leave_quickly_if_uncaught(has_peers=True)
"""


def run_uncaught(code, *options, **environ):
    command = [sys.executable, *options, "-c", f"{UNCAUGHT}{code}"]
    environ = {**os.environ, **environ}
    return subprocess.run(command, env=environ, input="", capture_output=True, text=True, timeout=400, check=False)


def test_uncaught_exception_ends_the_program_without_teardown():
    done = run_uncaught("raise ValueError('the error')")
    assert done.returncode == 1
    assert done.stdout == "handler\n"
    assert done.stderr.startswith("Traceback")
    assert done.stderr.endswith("ValueError: the error\n")


@pytest.mark.parametrize(
    ("code", "options", "returncode"),
    [
        ("raise KeyboardInterrupt", (), -signal.SIGINT),
        ("sys.exit(4)", (), 4),
        ("raise ValueError", ("-i",), 0),
        ("import code; code.interact(); print('goes on')", (), 0),
        ("import threading, time; threading.Thread(target=time.sleep, args=[0.2]).start(); raise ValueError", (), 1),
    ],
    ids=["interrupt", "sys.exit", "interactive", "console", "thread"],
)
def test_other_ends_of_a_program_stay_as_they_are(code, options, returncode):
    done = run_uncaught(code, *options)
    assert done.returncode == returncode
    assert "torn down" in done.stdout


def test_error_in_a_console_does_not_end_it():
    code = "import code; code.InteractiveInterpreter().runsource('1 / 0'); print('goes on')"
    assert run_uncaught(code).stdout.startswith("goes on")
