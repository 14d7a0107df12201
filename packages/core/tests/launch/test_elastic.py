"""Files by which ranks and their supervisor agree on a smaller group."""

import os
import signal
import subprocess
import threading

import pytest

from dstrat.errors import RankFailedError
from dstrat.launch import elastic, rank
from dstrat.launch.elastic import Regrouping, join_group, offer_sizes, wait_for_regrouping, withdraw_sizes
from dstrat.launch.processes import RankProcess
from dstrat.launch.recovery import Recovery, SavePoint, path_exists, record_save_point, this_attempt
from dstrat.launch.signals import Watchdog


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the job's folder of this process, which is rank 2 of 3 for the time of the test."""
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.setattr(rank, "_this_rank", rank.ThisRank(folder=folder, runs_script=False))
    variables = {"RANK": "2", "LOCAL_RANK": "2", "WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
    for name, value in {
        **variables,
        "DSTRAT_RESTART_COUNT": "0",
        "DSTRAT_NUM_STARTED": "",
        "DSTRAT_GROUP": "0",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("DSTRAT_NUM_STARTED")
    return folder


@pytest.fixture
def dead():
    """Start a process that can be killed, and guard it."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


@pytest.fixture
def regrouping(folder, tmp_path):
    recovery = Recovery(2, path_exists)
    recovery.begin_attempt(folder)
    with Watchdog(tmp_path / "watched") as watchdog:
        yield Regrouping(folder, recovery, watchdog)


def death():
    return RankFailedError("rank 0 of 3 was killed by SIGKILL", rank=0, exit_code=-signal.SIGKILL)


def save(path):
    path.touch()
    record_save_point(SavePoint(launch=0, checkpoint=str(path), step=10, log_dirs=[], bookmarks=[]))


def process_of(number, pid):
    return RankProcess(rank=number, pid=pid, poll=lambda: None)


def test_survivor_becomes_a_rank_of_the_next_attempt(folder, regrouping, tmp_path, dead):
    offer_sizes([1, 2, 3], 0)
    save(tmp_path / "a.ckpt")
    assert regrouping.begin(death(), 2)
    assert wait_for_regrouping(is_expected=False)
    joined = []
    thread = threading.Thread(target=lambda: joined.append(join_group()))
    thread.start()
    survivor = process_of(2, os.getpid())
    while not regrouping.is_ready(survivor):
        pass
    dead.kill()
    group = regrouping.form_group([process_of(1, 1), survivor], [process_of(0, dead.pid)], death())
    thread.join()
    assert joined == [True]
    assert [(each.rank, each.pid) for each in group] == [(0, 1), (1, os.getpid())]
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "DSTRAT_RESTART_COUNT", "DSTRAT_NUM_STARTED")
    assert [os.environ[name] for name in names] == ["1", "1", "2", "2", "1", "3"]
    attempt = this_attempt()
    assert (attempt.number, attempt.save_point(0).checkpoint) == (2, str(tmp_path / "a.ckpt"))
    assert not wait_for_regrouping(is_expected=False)  # in the new attempt nobody has died


@pytest.mark.parametrize("case", ["no fit", "another number", "no restart remains"])
def test_all_ranks_are_restarted_without_an_announcement(folder, regrouping, case):
    if case != "no fit":
        offer_sizes([1, 3] if case == "another number" else [1, 2], 0)
    if case == "no restart remains":
        regrouping.recovery.max_restarts = 0
    assert not regrouping.begin(death(), 2)
    assert not wait_for_regrouping(is_expected=False)


def test_group_is_not_formed_without_a_checkpoint(folder, regrouping, tmp_path):
    offer_sizes([2], 0)
    for step, checkpoint in ((0, None), (5, str(tmp_path / "gone"))):  # the first one is the beginning of the fit
        record_save_point(SavePoint(launch=0, checkpoint=checkpoint, step=step, log_dirs=[], bookmarks=[]))
    assert regrouping.begin(death(), 2)
    assert regrouping.form_group([process_of(1, 1), process_of(2, 2)], [], death()) is None
    assert regrouping.recovery.failed == []  # the restart counts the attempt


def test_offer_ends_with_the_fit(folder, regrouping):
    offer_sizes([1, 2], 0)
    withdraw_sizes()
    withdraw_sizes()
    assert not regrouping.begin(death(), 2)


def test_rank_that_has_lost_a_peer_with_an_error_waits_for_no_group(folder, monkeypatch):
    monkeypatch.setattr(elastic, "_ANNOUNCEMENT", 60.0)
    (folder / "failure-7-before-cleanup.json").touch()
    assert not wait_for_regrouping(is_expected=True)


def test_rank_gives_up_where_no_group_is_formed(folder, monkeypatch):
    monkeypatch.setattr(elastic, "READY", 0.05)
    assert not join_group()
    assert os.environ["RANK"] == "2"


def test_rank_that_leaves_for_newcomers_waits_for_a_late_one(folder, monkeypatch):
    monkeypatch.setattr(elastic, "READY", 0.0)
    (folder / "newcomers-0").touch()
    joined = []
    thread = threading.Thread(target=lambda: joined.append(join_group()))
    thread.start()
    thread.join(0.3)
    assert joined == []
    (folder / "group-1.json").write_text(f'{{"ranks": {{"{os.getpid()}": 0, "1": 1}}, "restart_count": 0}}')
    thread.join()
    assert (joined, os.environ["RANK"], os.environ["WORLD_SIZE"]) == ([True], "0", "2")


def test_children_of_a_dead_rank_are_ended(regrouping, dead):
    regrouping.bury(process_of(0, dead.pid))
    assert dead.wait(300) == -signal.SIGKILL
    regrouping.bury(process_of(0, dead.pid))  # nothing of it remains


def test_newcomer_that_is_late_is_named_once(folder, regrouping, monkeypatch, capfd, dead):
    monkeypatch.setattr(elastic, "_ARRIVAL", 0.0)
    offer_sizes([1, 2, 3], 0)
    save(folder / "a.ckpt")
    assert regrouping.begin(death(), 2)
    regrouping.start_newcomer = lambda number: process_of(number, dead.pid)
    group = regrouping.form_group([process_of(1, 1), process_of(2, 2)], [process_of(0, dead.pid)], death())
    assert [regrouping.grow(group) for _ in range(3)] == [None] * 3
    printed = capfd.readouterr().err
    assert printed.count(f"process {dead.pid} is to take the place of a rank that was killed, and has not come") == 1
