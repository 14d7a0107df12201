"""Hang detection among ranks: which of them hang by their states, and which end."""

import signal
import threading
import time
from pathlib import Path

import pytest
from tests.warm_program import WarmProgram
from torch.distributed import TCPStore

from dstrat.launch import ended_peers
from dstrat.launch.peer_watch import RankState, find_hung_ranks

AT_WORK = RankState(idle_seconds=0.0)
IDLE = RankState(idle_seconds=20.0)
WAITING = RankState(idle_seconds=0.0, waits_in_collective=True)  # busily, as for a GPU
IDLE_AND_WAITING = RankState(idle_seconds=20.0, waits_in_collective=True)
ENDED = RankState(has_ended=True)


@pytest.mark.parametrize(
    ("states", "unresponsive", "hung"),
    [
        ([IDLE, WAITING, IDLE_AND_WAITING], set(), [0]),
        ([IDLE, IDLE, WAITING], set(), [0, 1]),
        ([IDLE, AT_WORK, WAITING], set(), []),
        ([WAITING, WAITING, WAITING], set(), []),
        ([IDLE_AND_WAITING, IDLE_AND_WAITING, WAITING], set(), [0, 1]),
        ([AT_WORK, WAITING, WAITING], {0}, [0]),
        ([WAITING, WAITING, IDLE_AND_WAITING], {0}, [0]),
        ([AT_WORK, IDLE, WAITING], {0}, [0, 1]),
        ([AT_WORK, AT_WORK, WAITING], {0}, []),
        ([IDLE, ENDED, ENDED], set(), [0]),
        ([ENDED, WAITING, AT_WORK], {0}, []),
    ],
)
def test_ranks_hang_that_do_not_wait_while_all_others_do(states, unresponsive, hung):
    assert find_hung_ranks(dict(enumerate(states)), unresponsive, limit=10.0) == hung


@pytest.fixture
def start_ranks():
    """Start ranks that wait busily for the last one, which misbehaves."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    ranks = []

    def start_ranks(deed, size, local_size):
        script = Path(__file__).with_name("peer_watch_rank.py")
        numbers = ((rank, size, local_size, store.port) for rank in range(size))
        ranks[:] = [WarmProgram(script, deed, *map(str, each)) for each in numbers]
        return ranks

    yield start_ranks
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGKILL)
        if not rank.stdout.closed:
            rank.communicate()


def test_idle_rank_that_waits_ends_beyond_the_first_ranks(start_ranks):
    *_, last = start_ranks("wait", 5, local_size=5)
    _, errors = last.communicate(timeout=400)
    assert "rank 4 of 5 hung: no progress for 1 s, and ranks 0, 1, 2, 3 waited." in errors
    assert "Stack of rank 0:\n\nCurrent thread" in errors
    assert last.returncode == 1


def test_rank_at_work_that_is_met_in_ever_other_collectives_does_not_hang(start_ranks):
    assert [rank.run(timeout=400) for rank in start_ranks("work", 2, local_size=2)] == ["", ""]


@pytest.mark.parametrize("deed", ["stop", "die"])
def test_rank_that_stops_or_dies_is_named_by_one_of_its_machine(start_ranks, deed):
    ranks = start_ranks(deed, 6, local_size=4)
    _, errors = ranks[4].communicate(timeout=400)
    assert "rank 5 of 6 hung: no progress for 1 s, and ranks 0, 1, 2, 3, 4 waited." in errors
    assert ranks[4].returncode == 1


def test_stopped_rank_continues_when_its_peers_end(start_ranks):
    ranks = start_ranks("stop", 2, local_size=2)
    _, errors = ranks[0].communicate(timeout=400)
    assert "rank 1 of 2 hung" in errors
    state = Path("/proc", str(ranks[1].pid), "stat").read_text().rpartition(")")[2].split()[0]
    assert state != "T"  # torchrun's SIGTERM would have no effect on it


def test_sigterm_takes_effect_within_a_step_only_after_the_end_of_a_peer(start_ranks):
    waiting, sleeping = start_ranks("sleep", 2, local_size=2)
    assert sleeping.next_lines(1) == ["sleeps\n"]
    sleeping.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert sleeping.poll() is None  # it waits for the end of the step
    waiting.send_signal(signal.SIGKILL)
    sleeping.communicate(timeout=300)
    assert sleeping.returncode == -signal.SIGTERM


def test_sigterm_ends_a_rank_in_native_code_only_after_the_end_of_a_peer(start_ranks):
    waiting, blocking = start_ranks("block", 2, local_size=2)
    assert blocking.next_lines(1) == ["blocks\n"]
    blocking.send_signal(signal.SIGTERM)
    time.sleep(2)
    assert blocking.poll() is None  # what it waits for may come
    waiting.send_signal(signal.SIGKILL)
    blocking.communicate(timeout=300)
    assert blocking.returncode == 128 + signal.SIGTERM


def test_processes_of_a_frozen_store_are_not_waited_for():
    frozen = threading.Event()

    class FrozenJob:
        def read_processes(self):
            frozen.wait(300)
            return {}

    try:
        assert ended_peers._read_processes(FrozenJob()) is None
    finally:
        frozen.set()
