from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from dstrat.errors import LaunchError
from dstrat.interfaces.accelerator import _is_unusable_after_fork
from dstrat.launch.local import LocalLauncher
from dstrat.launch.signals import Interrupts


class Thread:
    """Stands for what waits, when it is freed, for a thread that a fork does not copy."""

    def __init__(self, path):
        self.path, self.pid, self.cycle = path, os.getpid(), self

    def __del__(self):
        if os.getpid() != self.pid:
            self.path.touch()


def test_a_forked_rank_does_not_free_the_garbage_of_its_parent(tmp_path):
    gc.disable()
    try:
        Thread(tmp_path / "freed")
        LocalLauncher(num_processes=2, start_method="fork").launch(gc.collect)
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.collect()
    assert not (tmp_path / "freed").exists()
    LocalLauncher(num_processes=2, start_method="fork").launch(gc.collect)
    assert gc.isenabled()


class RecordedInterrupts(Interrupts):
    """Records the blocked signals at the end of each block."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def _unblock(self):
        self.masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        super()._unblock()


START_SERVER = """
import multiprocessing, sys
from pathlib import Path
from packages.core.tests.launch.test_forking import RecordedInterrupts
from dstrat.launch.processes import start_served
from dstrat.launch.signals import STOP_SIGNALS

class Folderless:
    folder = Path("/nonexistent")
    def rank_environment(self, local_rank):
        return {}
    def global_rank(self, local_rank):
        return local_rank

if __name__ == "__main__":
    with RecordedInterrupts() as interrupts:
        start_served(Folderless(), 0, interrupts)
    assert set(STOP_SIGNALS) <= interrupts.masks[0], interrupts.masks
"""


def test_the_fork_server_starts_with_signals_blocked(tmp_path):
    (tmp_path / "start.py").write_text(START_SERVER)
    root = Path(__file__).parents[4]
    done = subprocess.run(
        [sys.executable, tmp_path / "start.py"],
        env={**os.environ, "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr


def take_signal(interrupts):
    """Receive an interrupt as a forked rank does in its set-up; the exit code says when it acted."""
    code = 1
    try:
        os.kill(os.getpid(), signal.SIGINT)
        code = 2
        interrupts.restore()
    except KeyboardInterrupt:
        sys.exit(code)


def test_an_interrupt_of_a_rank_that_is_being_forked_acts_after_its_set_up():
    with Interrupts() as interrupts:
        with interrupts.blocked():
            process = multiprocessing.get_context("fork").Process(target=take_signal, args=(interrupts,))
            process.start()
            signal.raise_signal(signal.SIGINT)  # to this thread: another thread has it not blocked, and may be late
        assert interrupts.received == [signal.SIGINT]
        process.join()
    assert process.exitcode == 2


def launch_in_daemon(start_method, pipe):
    try:
        pipe.send(LocalLauncher(num_processes=1, start_method=start_method).launch(os.getppid))
    except LaunchError as error:
        pipe.send(str(error))


@pytest.mark.parametrize("start_method", ["fork", "forkserver"])
def test_a_daemon_of_multiprocessing_is_told_what_can_start_ranks_there(start_method):
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("fork")
    process = context.Process(target=launch_in_daemon, args=(start_method, theirs), daemon=True)
    process.start()
    assert ours.poll(60)
    message = ours.recv()
    process.join()
    assert message == (
        f"start_method='{start_method}' cannot be used in a daemon process of multiprocessing, such as a worker of a "
        "Pool, of a DataLoader or of Celery's prefork pool, which may have no children of that kind: choose "
        "start_method='spawn', or train in the main process"
    )


@pytest.mark.parametrize("uses_driver", [True, False])
def test_a_driver_that_was_used_is_seen_though_the_device_is_not_initialized(uses_driver):
    parent = os.getpid()
    module = SimpleNamespace(_is_in_bad_fork=lambda: uses_driver and os.getpid() != parent)
    assert _is_unusable_after_fork(module) is uses_driver
