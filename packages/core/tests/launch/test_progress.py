"""Which processes are taken to do nothing."""

import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from dstrat.launch.progress import Activity, IdleTimer, RankWatch, progress_file, read_activities


@contextmanager
def running(code):
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", f"import os, sys, time\nprint(flush=True)\n{code}"], stdout=-1
    )
    process.stdout.readline()
    try:
        yield process.pid
    finally:
        process.kill()
        process.communicate()


SLEEPS = "time.sleep(600)"
READS = "file = open('/dev/zero', 'rb')\nwhile True:\n    file.read(100_000)\n    time.sleep(0.1)"
STARTS_WORK = "parent = os.getpid()\nif os.fork():\n    time.sleep(600)\nwhile os.getppid() == parent:\n    pass"


@pytest.mark.parametrize(("code", "is_idle"), [(SLEEPS, True), (READS, False), (STARTS_WORK, False)])
def test_process_is_idle_that_neither_computes_nor_reads_nor_has_children_that_do(code, is_idle):
    with running(code) as pid:
        deadline = time.monotonic() + 300
        while True:
            before = read_activities([pid])[pid]
            time.sleep(1.0)
            was_idle = read_activities([pid])[pid].is_idle_since(before)
            # On a busy machine a process that sleeps may wait for a processor now and then, which counts as work.
            if was_idle is is_idle or not is_idle or time.monotonic() > deadline:
                break
        assert was_idle is is_idle


def test_names_of_other_programs_may_have_any_bytes():
    with running("open('/proc/self/comm', 'wb').write(b'caf\\xe9 ) 1')\nprint(flush=True)\ntime.sleep(600)") as pid:
        while b"caf" not in Path("/proc", str(pid), "stat").read_bytes():
            time.sleep(0.01)
        assert list(read_activities([pid])) == [pid]


NOTHING = {"seconds": 0.0, "seconds_waited": 0.0, "num_bytes": 0, "num_network_bytes": 0}


def test_time_in_which_the_watcher_was_stopped_does_not_count():
    timer = IdleTimer(2.0)
    times = [0.0, 0.5, 1.0, 100.0, 100.5]
    idle = [timer.update(Activity(time=time, **NOTHING)) for time in times]
    assert idle == [0.0, 0.5, 1.0, 0.0, 0.5]


RECEIVES = {"seconds": 0.01, "num_network_bytes": 1_000_000}
COMPUTES_ON_A_BUSY_MACHINE = {"seconds": 0.02, "seconds_waited": 0.6}


@pytest.mark.parametrize("done", [{"seconds": 0.5}, {"num_bytes": 100_000}, RECEIVES, COMPUTES_ON_A_BUSY_MACHINE])
def test_whatever_is_done_begins_a_new_count(done):
    timer = IdleTimer(2.0)
    idle = [
        timer.update(Activity(time=time, **(NOTHING | done if time > 1 else NOTHING))) for time in (0.0, 1.0, 2.0, 3.0)
    ]
    assert idle == [0.0, 1.0, 0.0, 1.0]
    assert timer.update(None) == 0.0


def test_a_rank_that_sleeps_on_a_busy_machine_is_idle():
    timer = IdleTimer(2.0)  # while a thread of Gloo wakes up a hundred times in a second, and waits 2 ms each time
    readings = [Activity(time=time, **NOTHING | {"seconds_waited": 0.2 * time}) for time in (0.0, 1.0, 2.0)]
    assert [timer.update(reading) for reading in readings] == [0.0, 1.0, 2.0]


def test_network_of_other_jobs_is_no_activity_of_a_rank_that_sleeps():
    timer = IdleTimer(2.0)
    readings = [Activity(time=time, **NOTHING | {"num_network_bytes": int(time * 10**9)}) for time in (0.0, 1.0, 2.0)]
    assert [timer.update(reading) for reading in readings] == [0.0, 1.0, 2.0]


def test_rank_of_a_job_on_several_machines_is_given_as_long_as_collectives_take(tmp_path):
    with running(SLEEPS) as pid:
        progress_file(tmp_path, pid).write_text("0.1 600.0")
        alone, with_others = (RankWatch(tmp_path, spans_machines=spans) for spans in (False, True))
        deadline = time.monotonic() + 300
        while not alone.idle_ranks([pid]) and time.monotonic() < deadline:
            assert not with_others.idle_ranks([pid])
            time.sleep(0.05)
        assert time.monotonic() < deadline
