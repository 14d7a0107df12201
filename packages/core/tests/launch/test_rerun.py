"""Ranks that run the script once more: what it finds there, and what happens when it catches errors."""

from textwrap import dedent

import pytest

HEADER = """
import os, sys, time
from dstrat.errors import RankFailedError
from train import launcher, write

def in_rank():
    return "DSTRAT_RANK_PID" in os.environ
"""


@pytest.fixture
def run(program):
    def run(code, *arguments, flags=(), **environ):
        (program.folder / "script.py").write_text(HEADER + dedent(code))
        return program.run(*flags, "script.py", *arguments, **environ)

    return run


SHOW = """
import pickle

class Mine:
    pass

def show():
    import __main__
    assert isinstance(pickle.loads(pickle.dumps(Mine())), Mine)
    assert __main__.Mine is Mine
    seen = (sys.argv, sys.path[0], __file__, __name__, __spec__ and __spec__.name, sys.flags.bytes_warning,
            sys.warnoptions, sys._xoptions, sys.stdout.write_through, os.getcwd())
    write("rank" if in_rank() else "parent", seen)
"""


@pytest.mark.parametrize("flags", [(), ("-u", "-bW", "error::UserWarning", "-Xtracemalloc")])
def test_script_finds_what_it_found_the_first_time(run, program, flags):
    code = SHOW + "show()\nsys.argv.clear()\nlauncher('popen').launch(int)\n"
    outcome = run(code, "--lr", "0.1", flags=flags)
    assert outcome.code == 0
    assert program.wait_for("rank") == program.wait_for("parent")
    assert "'--lr', '0.1'" in program.wait_for("rank")


def test_script_that_has_changed_the_directory_starts_where_it_was_started(run, program):
    code = "import multiprocessing\nos.mkdir('sub') if not in_rank() else None\nos.chdir('sub')\n"
    assert run(code + "launcher('popen').launch(write, '../done')\n").code == 0
    program.wait_for("done")


REMOVED = """
import os
if "DSTRAT_RANK_PID" not in os.environ:
    os.mkdir("gone")
    os.chdir("gone")
    import multiprocessing.process
    os.chdir("..")
    os.rmdir("gone")
"""


def test_ranks_start_where_the_directory_of_the_start_was_removed(program):
    code = REMOVED + HEADER + "launcher('popen').launch(write, 'done')\n"
    (program.folder / "script.py").write_text(code)
    outcome = program.run("script.py")
    assert outcome.code == 0
    program.wait_for("done")


def test_module_is_run_as_a_module_again(program):
    package = program.folder / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "__main__.py").write_text(HEADER + SHOW + "show()\nlauncher('popen').launch(int)\n")
    assert program.run("-m", "package", "--lr", "0.1").code == 0
    assert program.wait_for("rank") == program.wait_for("parent")
    assert "package.__main__" in program.wait_for("rank")


def test_workers_of_a_rank_find_the_script_with_spawn(run):
    code = """
    import multiprocessing

    def double(number):
        return 2 * number

    def work():
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            assert pool.map(double, [1, 2]) == [2, 4]

    if __name__ == "__main__":
        launcher("popen").launch(work)
    """
    outcome = run(code)
    assert (outcome.code, outcome.errors) == (0, "")


def test_output_is_flushed_and_exit_handlers_run(run):
    code = """
    import atexit
    launcher("popen").launch(print, "launched")
    atexit.register(print, "at exit")
    sys.stdout.write("last")
    """
    outcome = run(code)
    assert outcome.output.count("last") == outcome.output.count("at exit") == outcome.output.count("launched") == 2


def test_code_after_the_launch_runs_in_the_ranks_only(run, program):
    code = """
    try:
        launcher("popen").launch(int)
    finally:
        write(f"finally-{in_rank()}")
    write(f"after-{in_rank()}")
    """
    assert run(code).code == 0
    assert {path.name for path in program.folder.glob("*-*")} == {"finally-True", "finally-False", "after-True"}


def test_rank_that_fails_never_comes_back_to_the_script(run, program):
    code = """
    def work():
        raise ValueError("boom")

    try:
        launcher("popen").launch(work)
    except BaseException as error:
        write(f"caught-{in_rank()}", repr(error))
        raise
    """
    outcome = run(code)
    assert outcome.code == 1
    assert [path.name for path in program.folder.glob("caught-*")] == ["caught-False"]


def test_launch_after_failed_ones_finds_the_script_in_the_same_state(run, program):
    code = """
    def work(number):
        if number < 2:
            raise ValueError(f"boom {number}")
        return number

    caught = []
    for number in range(4):
        try:
            caught.append(launcher("popen").launch(work, number))
        except RankFailedError as error:
            caught.append((str(error).splitlines()[0], error.rank, error.exit_code))
    write(f"done-{os.environ['RANK']}", caught)
    """
    outcome = run(code)
    assert outcome.code == 0
    for rank in range(2):
        caught = eval(program.wait_for(f"done-{rank}"))
        assert [line.partition("failed: ")[2] for line, *_ in caught[:2]] == [
            "ValueError: boom 0",
            "ValueError: boom 1",
        ]
        assert caught[0][2] == 1
        assert caught[2:] == [2, 3]


def test_ranks_know_that_they_only_repeat_what_another_process_has_done(run, program):
    code = """
    repeating = []
    for number in range(3):
        repeating.append(launcher("popen").repeats_the_script)
        try:
            launcher("popen").launch(divmod, 1, number)
        except RankFailedError:
            pass
    write(f"done-{os.environ['RANK']}", [*repeating, launcher("popen").repeats_the_script])
    """
    assert run(code).code == 0
    assert program.wait_for("done-0") == "[True, True, False, False]"


def test_failure_outside_of_any_launch_is_shown(run):
    code = "if os.environ['RANK'] == '1': raise KeyError('gone')\ntime.sleep(600)"
    outcome = run(f"launcher('popen').launch(int)\n{code}")
    assert outcome.code == 1
    assert outcome.errors.startswith("dstrat.errors.RankFailedError: rank 1 of 2 failed: KeyError: 'gone'\n")
    assert outcome.errors.count("Traceback") == 1  # not that of the process which still stands in the launch


def test_script_that_gives_up_with_a_message_is_shown(run):
    outcome = run("launcher('popen').launch(int)\nsys.exit('no data')")
    assert outcome.code == 1
    assert "of 2 failed: SystemExit: no data" in outcome.errors


def test_thread_that_is_no_daemon_is_waited_for(run, program):
    code = """
    from concurrent.futures import ThreadPoolExecutor
    launcher("popen").launch(int)
    def late():
        time.sleep(0.3)
        write(f"late-{os.environ['RANK']}")
    ThreadPoolExecutor().submit(late)
    """
    assert run(code).code == 0
    assert len(list(program.folder.glob("late-?"))) == 2


@pytest.mark.parametrize("how", ["-c", "-"])
def test_program_without_a_script_is_told_what_to_do(program, how):
    code = HEADER + "launcher('popen').launch(int)\n"
    outcome = program.run("-c", code) if how == "-c" else program.run("-", text=code)
    assert outcome.code == 1
    assert (
        "LaunchError: start_method='popen' runs the script once more in each rank, and this is no script"
        in outcome.errors
    )
    assert "start_method='fork'" in outcome.errors


def test_dstrat_is_found_where_only_the_script_extends_the_path(program):
    """As in a checkout that is not installed."""
    import dstrat

    source = str(next(iter(dstrat.__path__)))[: -len("dstrat")]
    code = f"import sys\nsys.path.insert(0, {source!r})\n" + HEADER + "launcher('popen').launch(print, 'ran')\n"
    (program.folder / "script.py").write_text(code)
    outcome = program.run("-S", "script.py")
    assert (outcome.code, outcome.output.count("ran")) == (0, 2)
