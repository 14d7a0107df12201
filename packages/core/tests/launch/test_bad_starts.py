"""Launches that cannot work: one clear error, before or instead of a hang."""

import socket
from textwrap import dedent

import pytest

from dstrat.errors import LaunchError, RequestError
from dstrat.launch.local import LocalLauncher

SPAWNING = pytest.mark.parametrize("method", ["spawn", "forkserver"])


@pytest.fixture
def run(program):
    def run(code, **environ):
        (program.folder / "script.py").write_text("import os, threading\nfrom train import launcher\n" + dedent(code))
        return program.run("script.py", **environ)

    return run


@SPAWNING
def test_argument_that_cannot_be_pickled_is_named_before_anything_starts(method):
    class Config:
        pass

    with pytest.raises(LaunchError, match=r"argument 'config' \(Config\) cannot be pickled") as caught:
        LocalLauncher(num_processes=2, start_method=method).launch(print, 1, config=Config())
    assert "choose start_method='fork' or 'popen'" in str(caught.value)


@SPAWNING
def test_innermost_part_that_cannot_be_pickled_is_named(method, rank_functions):
    config = {"schedule": [1, lambda step: step]}
    with pytest.raises(LaunchError, match=r"argument 0\['schedule'\]\[1\] \(function\) cannot be pickled"):
        LocalLauncher(num_processes=2, start_method=method).launch(rank_functions.identity, config)


@SPAWNING
def test_local_function_is_named(method):
    def work():
        return None

    with pytest.raises(LaunchError, match=r"the function \(function\) cannot be pickled"):
        LocalLauncher(num_processes=2, start_method=method).launch(work)


@SPAWNING
def test_script_without_main_guard_is_told_to_add_one(run, method):
    outcome = run(f"launcher({method!r}).launch(print, 'ran')")
    assert outcome.code == 1
    assert outcome.output == ""
    assert 'put the part that trains under `if __name__ == "__main__":`' in outcome.errors
    assert "each rank imports script.py" in outcome.errors
    assert outcome.errors.count("Traceback") == 1


@SPAWNING
def test_script_that_fails_on_import_in_a_rank_shows_its_traceback(run, method):
    code = f"""
    if __name__ == "__main__":
        launcher({method!r}).launch(print, "ran")
    else:
        raise OSError("no such data")
    """
    outcome = run(code)
    assert outcome.code == 1
    assert "of 2 failed: OSError: no such data" in outcome.errors
    assert "multiprocessing" not in outcome.errors
    assert outcome.errors.count("Traceback") == 2


def test_port_that_is_taken_is_named(program):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        outcome = program.run("train.py", "popen", "succeed", MASTER_PORT=port)
    assert outcome.code == 1
    assert (
        f"LaunchError: MASTER_PORT is {port}, and that port cannot be used (Address already in use)" in outcome.errors
    )


def test_port_that_is_free_is_used(program):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    assert program.run("train.py", "spawn", "succeed", MASTER_PORT=port).code == 0
    assert program.wait_for("ran-1") == port


def test_start_method_that_does_not_exist_is_refused():
    with pytest.raises(RequestError, match="start_method 'thread' is not one of popen, spawn, fork, forkserver"):
        LocalLauncher(num_processes=2, start_method="thread")


def test_rank_that_cannot_be_started_ends_those_that_were(run):
    code = """
    import subprocess, time

    class Popen(subprocess.Popen):
        count = 0

        def __init__(self, *args, **kwargs):
            Popen.count += 1
            if Popen.count == 3:  # the watchdog, rank 0, and then the process table is full
                raise BlockingIOError(11, "Resource temporarily unavailable")
            super().__init__(*args, **kwargs)

    if __name__ == "__main__":
        subprocess.Popen = Popen
        launcher("spawn").launch(time.sleep, 60)
    """
    outcome = run(code)
    assert outcome.code == 1
    assert "LaunchError: local rank 1 of 2 cannot be started" in outcome.errors


def test_folder_of_temporary_files_with_too_long_a_name_is_told(program):
    folder = program.folder / ("long" * 25)
    folder.mkdir()
    outcome = program.run("train.py", "forkserver", "work", TMPDIR=str(folder))
    assert outcome.code == 1
    assert "cannot be started: AF_UNIX path too long: the path of a socket in the folder of tem" in outcome.errors


def test_time_to_stop_is_that_of_the_environment():
    def stop_grace(**options):
        return LocalLauncher(num_processes=1, **options).settings.stop_seconds

    assert stop_grace(environ={}) == 30
    assert stop_grace(environ={"DSTRAT_STOP_SECONDS": "0.5"}) == 0.5
    assert stop_grace(environ={"DSTRAT_STOP_SECONDS": "0.5"}, stop_grace=2.0) == 2.0


@pytest.mark.parametrize("text", ["", "soon", "0", "-1", "nan"])
def test_time_to_stop_that_is_none_is_refused(text):
    with pytest.raises(
        RequestError, match=f"DSTRAT_STOP_SECONDS needs a number of seconds, not '{text}': set it to how long"
    ):
        LocalLauncher(num_processes=1, environ={"DSTRAT_STOP_SECONDS": text})
