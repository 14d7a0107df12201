"""What every start method does, in programs as a user writes them."""

import os
import signal
import time

import pytest

START_METHODS = ("popen", "spawn", "fork", "forkserver")

pytestmark = pytest.mark.parametrize("method", START_METHODS)


def test_result_of_rank_zero_comes_back_or_the_script_runs_to_its_end(program, method):
    outcome = program.run("train.py", method, "succeed")
    assert outcome.code == 0
    assert outcome.errors == ""
    lines = outcome.output.splitlines()
    if method == "popen":
        assert sorted(lines) == [f"result {{'rank': {rank}, 'world_size': 2}}" for rank in range(2)]
    else:
        assert lines == ["result {'rank': 0, 'world_size': 2}"]
    assert program.wait_for("ran-0") == program.wait_for("ran-1")


def test_rank_that_raises_ends_the_job_and_shows_its_own_traceback(program, method):
    outcome = program.run("train.py", method, "fail")
    assert outcome.code == 1
    assert "RankFailedError: rank 1 of 2 failed: ValueError: boom\n\nTraceback" in outcome.errors
    assert 'raise ValueError("boom")' in outcome.errors
    of_the_script = method != "popen"  # where the script is run again, the rank's is the script's
    assert outcome.errors.count("Traceback") == 1 + of_the_script
    assert "runpy" not in outcome.errors


def test_rank_that_is_killed_is_named(program, method):
    outcome = program.run("train.py", method, "die")
    assert outcome.code == 1
    assert "rank 1 of 2 was killed by SIGKILL (perhaps" in outcome.errors


def test_rank_that_leaves_with_a_code_is_named(program, method):
    outcome = program.run("train.py", method, "leave")
    assert outcome.code == 1
    assert "rank 1 of 2 exited with code 3" in outcome.errors


def test_rank_that_ignores_sigterm_is_killed_too(program, method):
    outcome = program.run("train.py", method, "fail_stubbornly")
    assert outcome.code == 1
    assert "rank 1 of 2 failed: ValueError: boom" in outcome.errors


def test_workers_of_a_killed_rank_go_with_it(program, method):
    outcome = program.run("train.py", method, "die_with_workers")
    assert "rank 1 of 2 was killed by SIGKILL" in outcome.errors
    assert program.wait_until_gone() == []


def test_nothing_outlives_a_killed_supervisor(program, method):
    program.start("train.py", method, "wait_with_workers")
    program.wait_for("waits-0")
    program.wait_for("waits-1")
    assert len(program.processes()) >= 6  # supervisor, watchdog, two ranks and their workers
    program.process.kill()
    assert program.finish().code == -signal.SIGKILL
    assert program.wait_until_gone() == []


def test_first_ctrl_c_lets_the_ranks_stop_in_order(program, method):
    program.start("train.py", method, "stop_gently")
    program.wait_for("waits-0")
    program.wait_for("waits-1")
    os.kill(program.process.pid, signal.SIGINT)
    outcome = program.finish()
    assert outcome.code == -signal.SIGINT
    assert "SIGINT: all ranks stop at the next step" in outcome.errors
    assert outcome.errors.count("Traceback") == 1
    assert "supervisor.py" not in outcome.errors
    assert (program.folder / "stopped-0").exists()
    assert (program.folder / "stopped-1").exists()


def test_second_ctrl_c_ends_ranks_that_do_not_react(program, method):
    program.start("train.py", method, "wait_deaf")
    program.wait_for("waits-0")
    program.wait_for("waits-1")
    os.kill(program.process.pid, signal.SIGINT)
    time.sleep(0.3)
    assert program.process.poll() is None
    os.kill(program.process.pid, signal.SIGINT)
    assert program.finish().code == -signal.SIGINT


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_other_stop_signals_give_the_exit_code_that_shells_expect(program, method, number, code):
    program.start("train.py", method, "wait")
    program.wait_for("waits-0")
    program.wait_for("waits-1")
    os.kill(program.process.pid, number)
    outcome = program.finish()
    assert outcome.code == code
    assert "Traceback" not in outcome.errors
