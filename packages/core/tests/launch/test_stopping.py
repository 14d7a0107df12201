"""Stopping a job in unusual ways."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from dstrat.launch.job import JobSettings, LocalJob
from dstrat.launch.local import LocalLauncher
from dstrat.launch.processes import RankProcess
from dstrat.launch.signals import Interrupts, Watchdog
from dstrat.launch.supervisor import Supervisor


class TimeLimitError(BaseException):
    """What a plugin of tests raises when their time is over."""


@pytest.fixture
def waiting(program):
    """Start a program whose two ranks wait; return their process ids."""

    def start(case, method="fork"):
        program.start("train.py", method, case)
        return [int(program.wait_for(f"waits-{rank}")) for rank in range(2)]

    return start


def test_failure_of_a_rank_while_it_stops_is_shown(program, waiting):
    waiting("stop_badly")
    os.kill(program.process.pid, signal.SIGINT)
    outcome = program.finish()
    assert outcome.code == -signal.SIGINT
    assert "rank 1 of 2 failed: OSError: disk full" in outcome.errors
    assert outcome.errors.splitlines()[-1] == "KeyboardInterrupt"


def test_ranks_that_agree_to_stop_by_a_signal_to_one_of_them_have_not_failed(program, waiting):
    pids = waiting("stop_together")
    os.kill(pids[1], signal.SIGTERM)
    outcome = program.finish()
    assert outcome.code == 128 + signal.SIGTERM
    assert re.fullmatch(
        "ranks? 0(, 1)? of 2 exited with code 143, as after SIGTERM: all ranks have to stop\n", outcome.errors
    )
    assert (program.folder / "stopped-1").exists()


@pytest.mark.parametrize(
    ("case", "number", "code"),
    [("leave_as_interrupted", signal.SIGINT, -signal.SIGINT), ("leave_as_ended", signal.SIGTERM, 143)],
)
def test_rank_that_exits_with_the_code_of_a_signal_is_named(program, case, number, code):
    outcome = program.run("train.py", "fork", case)
    assert outcome.code == code
    assert (
        f"rank 1 of 2 exited with code {128 + number}, as after {number.name}: all ranks have to stop\n"
        in outcome.errors
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", ["popen", "spawn", "fork", "forkserver"])
def test_rank_that_waits_in_native_code_for_an_interrupted_one_is_ended(program, method):
    """No signal ends the opening of a process group, for which the other rank never comes."""
    program.start("train.py", method, "open_group_alone")
    program.wait_for("waits-0")
    pid = int(program.wait_for("opens-1"))
    wait_until(lambda: is_asleep(pid))
    os.kill(program.process.pid, signal.SIGINT)
    outcome = program.finish()
    assert outcome.code == -signal.SIGINT
    assert "did not stop" not in outcome.errors


SLOW_LIBRARY = """
import pickle, sys, time
from pathlib import Path

def save(payload, file, pickle_protocol):
    pickle.dump(payload, file)

if "forkserver" in str(sys.orig_argv):
    Path("imports").touch()
    time.sleep(600)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -signal.SIGINT), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_signal_while_the_fork_server_imports_ends_the_job(program, number, code):
    """As from a terminal, to the server too; it would answer, and end, when it has imported everything."""
    (program.folder / "torch.py").write_text(SLOW_LIBRARY)
    (program.folder / "script.py").write_text(
        "import torch\nfrom train import launcher, work\n"
        "if __name__ == '__main__': launcher('forkserver').launch(work, 'succeed')\n"
    )
    program.start("script.py")
    program.wait_for("imports")
    os.killpg(program.process.pid, number)
    outcome = program.finish()  # when its output is closed, which the server holds open too
    assert outcome.code == code
    assert "EOFError" not in outcome.errors
    assert program.wait_until_gone() == []


def test_a_fork_server_outlives_the_thread_that_started_it(program):
    (program.folder / "torch.py").write_text(
        "import pickle\ndef save(payload, file, pickle_protocol): pickle.dump(payload, file)\n"
    )
    (program.folder / "script.py").write_text(
        "import threading\nfrom multiprocessing import forkserver\nfrom train import launcher, work\n"
        "def launch():\n    launcher('forkserver').launch(work, 'succeed')\n"
        "    pids.append(forkserver._forkserver._forkserver_pid)\n"
        "if __name__ == '__main__':\n    pids = []\n    for _ in range(2):\n"
        "        thread = threading.Thread(target=launch)\n        thread.start()\n        thread.join()\n"
        "    print('servers', len(set(pids)))\n"
    )
    outcome = program.run("script.py")
    assert outcome.code == 0
    assert "servers 1" in outcome.output


def is_asleep(pid):
    """Return whether the main thread of a process waits in the kernel."""
    return Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"


def test_rank_that_was_asked_to_stop_from_outside_is_named(program, waiting):
    pids = waiting("stop_together_and_note")
    os.kill(pids[1], signal.SIGTERM)
    outcome = program.finish()
    assert outcome.code == 128 + signal.SIGTERM
    assert outcome.errors == (
        "SIGTERM: rank 1 of 2 received it from outside of this job, and all ranks have stopped after the same step\n"
    )


def states(program):
    """Return the kernel's letters for what the processes of a program do; T is stopped."""
    return {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in program.processes()}


def wait_until(is_true):
    deadline = time.monotonic() + 300
    while not is_true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("method", ["popen", "spawn", "fork", "forkserver"])
def test_ctrl_z_stops_all_ranks_and_fg_continues_them(program, method):
    terminal = program.start_in_terminal("bash", "--norc", "--noprofile", "-i")
    os.write(terminal, f"{sys.executable} train.py {method} count\n".encode())
    pids = [int(program.wait_for(f"waits-{rank}")) for rank in range(2)]
    for rank in range(2):
        program.wait_for(f"counted-{rank}")
    os.write(terminal, b"\x1a")  # Ctrl-Z
    wait_until(lambda: all(states(program).get(pid) == "T" for pid in pids))
    os.write(terminal, b"jobs -s > stopped; echo > asked\n")  # the shell has its prompt back
    program.wait_for("asked")
    assert "train.py" in (program.folder / "stopped").read_text()
    numbers = [program.wait_for(f"counted-{rank}") for rank in range(2)]
    os.write(terminal, b"fg\n")
    wait_until(lambda: all(program.wait_for(f"counted-{rank}") != numbers[rank] for rank in range(2)))
    (program.folder / "enough").touch()
    os.write(terminal, b"exit $?\n")
    assert program.process.wait(300) == 0
    os.close(terminal)


def test_terminal_that_closes_stops_the_ranks_in_order(program):
    terminal = program.start_in_terminal(sys.executable, "train.py", "fork", "hang_up")
    for rank in range(2):
        program.wait_for(f"waits-{rank}")
    os.close(terminal)
    assert program.process.wait(300) == 128 + signal.SIGHUP
    for rank in range(2):
        assert program.wait_for(f"stopped-{rank}") == "printed"


def test_script_that_ends_well_after_ctrl_c_has_ended_well(program):
    (program.folder / "script.py").write_text(
        "from train import launcher, stop_gently, os\n"
        "def work(): stop_gently(int(os.environ['RANK']))\n"
        "try: launcher('popen').launch(work)\n"
        "except KeyboardInterrupt: print('saved')\n"
    )
    program.start("script.py")
    program.wait_for("waits-0")
    program.wait_for("waits-1")
    os.kill(program.process.pid, signal.SIGINT)
    outcome = program.finish()
    assert outcome.code == 0
    assert outcome.output.count("saved") == 2


def test_rank_that_is_stopped_and_answers_nothing_is_killed(program, waiting):
    pids = waiting("wait")
    os.kill(pids[0], signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    outcome = program.finish()
    assert "rank 1 of 2 was killed by SIGKILL" in outcome.errors


def test_ignored_signals_stay_ignored(program):
    """As under nohup."""
    (program.folder / "script.py").write_text(
        "import signal\nfrom train import launcher, wait, work\n"
        "signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "launcher('fork').launch(work, 'wait')\n"
    )
    program.start("script.py")
    program.wait_for("waits-0")
    pid = int(program.wait_for("waits-1"))
    os.kill(program.process.pid, signal.SIGHUP)
    time.sleep(0.3)
    assert program.process.poll() is None
    os.kill(pid, signal.SIGKILL)
    assert "rank 1 of 2 was killed by SIGKILL" in program.finish().errors


def test_job_goes_on_and_ends_when_its_watchdog_is_killed(program, waiting):
    pids = waiting("wait_with_workers")
    (watchdog,) = (pid for pid, command in program.processes().items() if "dstrat-watchdog" in command)
    os.kill(watchdog, signal.SIGKILL)
    time.sleep(0.1)
    assert program.process.poll() is None
    os.kill(pids[0], signal.SIGKILL)
    assert "rank 0 of 2 was killed by SIGKILL" in program.finish().errors


def test_signal_after_the_ranks_have_ended_leaves_no_folder(program):
    """The supervisor reads the result then, which takes a while when it is large."""
    (program.folder / "script.py").write_text(
        "import time\nfrom train import launcher, write\n"
        "class Large:\n"
        "    def __getstate__(self): return 1\n"
        "    def __setstate__(self, state): write('reading'); time.sleep(600)\n"
        "if __name__ == '__main__': launcher('spawn').launch(Large)\n"
    )
    program.start("script.py")
    program.wait_for("reading")
    os.kill(program.process.pid, signal.SIGTERM)
    assert program.finish().code == -signal.SIGTERM
    assert program.wait_until_gone() == []


@pytest.mark.parametrize("method", ["popen", "spawn", "fork", "forkserver"])
def test_ranks_die_with_their_supervisor_even_without_a_watchdog(program, waiting, method):
    waiting("wait", method)
    (watchdog,) = (pid for pid, command in program.processes().items() if "dstrat-watchdog" in command)
    os.kill(watchdog, signal.SIGKILL)
    program.process.kill()
    program.finish()
    deadline = time.monotonic() + 300
    while program.processes() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert program.processes() == {}
    for folder in (program.folder / "tmp").iterdir():  # that was the watchdog's
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


@pytest.mark.parametrize("case", ["leave_well", "leave_without_a_word"])
def test_rank_that_leaves_before_the_function_returns_is_named(program, case):
    outcome = program.run("train.py", "spawn", case)
    assert outcome.code == 1
    assert "rank 0 of 2 exited with code 0 before the function had returned" in outcome.errors


def test_what_left_the_session_of_a_killed_rank_goes_with_the_job(program):
    outcome = program.run("train.py", "spawn", "die_with_sessions")
    assert "rank 1 of 2 was killed by SIGKILL" in outcome.errors
    assert program.wait_until_gone() == []


def test_what_left_the_session_of_a_rank_does_not_outlive_a_killed_supervisor(program, waiting):
    waiting("wait_with_sessions", "spawn")
    program.process.kill()
    program.finish()
    assert program.wait_until_gone() == []


def test_folder_of_sockets_does_not_stay_where_a_rank_is_killed(program):
    assert "rank 1 of 2 was killed by SIGKILL" in program.run("train.py", "spawn", "die_with_sockets").errors
    assert list((program.folder / "tmp").iterdir()) == []


def test_folder_that_was_removed_is_named_beside_the_error(program):
    outcome = program.run("train.py", "spawn", "fail_without_folder")
    assert outcome.code == 1
    assert "ValueError: boom" in outcome.errors
    assert "LaunchError" not in outcome.errors
    assert "rank 1 of 2 exited with code 1\n(the job's folder '" in outcome.errors
    assert "was removed while the job ran" in outcome.errors


def test_ranks_of_a_fork_server_that_lives_on_die_with_their_supervisor(program):
    """A copy of the supervisor keeps the server's pipe open."""
    (program.folder / "script.py").write_text(
        "import os, time\nfrom train import launcher, wait, work, write\n"
        "if __name__ == '__main__':\n"
        "    launcher('forkserver').launch(work, 'succeed')\n"
        "    pid = os.fork()\n"
        "    if pid == 0:\n"
        "        time.sleep(600)\n"
        "    write('copy', pid)\n"
        "    launcher('forkserver').launch(work, 'wait')\n"
    )
    program.start("script.py")
    copy, *ranks = [int(program.wait_for(name)) for name in ("copy", "waits-0", "waits-1")]
    (watchdog,) = (pid for pid, command in program.processes().items() if "dstrat-watchdog" in command)
    os.kill(watchdog, signal.SIGKILL)
    program.process.kill()
    wait_until(lambda: not set(ranks) & set(program.processes()))
    os.kill(copy, signal.SIGKILL)
    program.finish()
    for folder in (program.folder / "tmp").glob("dstrat-job-*"):  # that was the watchdog's
        shutil.rmtree(folder)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no notes")
def test_an_exception_that_a_signal_raises_while_ranks_run_shows_where_they_are(rank_functions):
    def end(number, frame):
        raise TimeLimitError

    previous = signal.signal(signal.SIGALRM, end)
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        with pytest.raises(TimeLimitError) as raised:
            LocalLauncher(num_processes=2, start_method="fork").launch(rank_functions.fall_asleep)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, previous)
    (note,) = raised.value.__notes__
    assert re.findall("^Stack of rank .*|in [a-z_]+$", note, re.MULTILINE) == [
        "Stack of rank 0:",
        "in fall_asleep",
        "Stack of rank 1:",
        "in fall_asleep",
    ]


def test_watchdog_ends_the_groups_that_it_guards_and_no_forgotten_one(tmp_path):
    folder = tmp_path / "job"
    folder.mkdir()
    sleepers = [subprocess.Popen(["sleep", "60"], start_new_session=True) for _ in range(3)]
    try:
        with Watchdog(folder) as watchdog:
            for sleeper in sleepers:
                watchdog.guard(sleeper.pid)
            watchdog.forget(sleepers[1].pid)
            watchdog.let_go()  # as its supervisor's end does
            codes = [sleepers[number].wait(300) for number in (0, 2)]
            deadline = time.monotonic() + 300
            while folder.exists() and time.monotonic() < deadline:
                time.sleep(0.01)
        assert codes == [-signal.SIGKILL] * 2
        assert not folder.exists()
        assert sleepers[1].poll() is None
    finally:
        for sleeper in sleepers:
            sleeper.kill()
            sleeper.wait()


@pytest.mark.parametrize("looks", range(1, 10))
def test_job_whose_last_rank_ends_between_two_looks_has_stopped_well(tmp_path, looks):
    ended = subprocess.Popen(["true"])
    ended.wait()
    left = iter([None] * looks)
    processes = [
        RankProcess(rank=0, pid=ended.pid, poll=lambda: 0),
        RankProcess(rank=1, pid=ended.pid, poll=lambda: next(left, 0)),
    ]
    job = LocalJob(folder=tmp_path, num_processes=2, num_nodes=1, node_rank=0, address="127.0.0.1", port=0, environ={})
    interrupts = Interrupts()
    interrupts.received.append(signal.SIGINT)
    try:
        Supervisor(processes, job, JobSettings(num_processes=2), interrupts).run()
    except KeyboardInterrupt:  # would end pytest
        pytest.fail("the job was interrupted")
