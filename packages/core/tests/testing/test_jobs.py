"""Functions in several ranks: those that stay for others, and what is told of those that fail."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from dstrat.testing.ranks.jobs import end_teams, run_in_team, run_job


@pytest.fixture(autouse=True)
def no_team_stays():
    yield
    end_teams()


def pid(place):
    return os.getpid()


def fail(place):
    if place.rank == 1:
        raise ValueError("what is this batch?")


def fail_where_another_ran(place):
    if "left_behind" in sys.modules:
        raise ValueError("somebody was here before")
    sys.modules["left_behind"] = sys
    return place.rank


def change_dtype(place):
    torch.set_default_dtype(torch.float64)


def write(place):
    (place.folder / str(place.rank)).touch(exist_ok=False)
    place.folder.joinpath("ready").touch()
    return place.folder


def die(place):
    print("the last words")
    sys.stdout.flush()
    if place.rank == 0:
        os._exit(3)


def test_ranks_stay_for_another_function():
    first = run_in_team(pid, 2)
    assert run_in_team(pid, 2) == first
    assert len(set(first)) == 2
    end_teams()
    assert not set(run_in_team(pid, 2)) & set(first)


def test_each_function_has_a_folder_of_its_own_that_is_gone_afterwards():
    for _ in range(2):
        folders = set(run_in_team(write, 2))
        assert len(folders) == 1
        assert not folders.pop().exists()


def test_after_a_failure_there_are_new_ranks():
    first = run_in_team(pid, 2)
    with pytest.raises(pytest.fail.Exception, match="rank 1 of 2 raised ValueError: what is this batch"):
        run_in_team(fail, 2)
    assert not set(run_in_team(pid, 2)) & set(first)


def test_what_fails_only_after_another_function_has_not_failed():
    assert run_in_team(fail_where_another_ran, 2) == [0, 1]
    assert run_in_team(fail_where_another_ran, 2) == [0, 1]


def test_ranks_that_a_function_leaves_in_another_state_run_no_other():
    first = run_in_team(pid, 2)
    run_in_team(change_dtype, 2)
    assert not set(run_in_team(pid, 2)) & set(first)


@pytest.mark.parametrize("run", [run_job, run_in_team])
def test_a_rank_that_dies_is_told_with_what_it_printed(run):
    with pytest.raises(pytest.fail.Exception, match=r"rank 0 of 2 died with exit code 3(?s:.*)the last words"):
        run(die, 2)


ARGUMENT_THAT_DOES_NOT_PICKLE = """
from multiprocessing import forkserver

forkserver.ensure_running()  # before it is told to load torch
from dstrat.testing.ranks.jobs import run_in_team

run_in_team(repr, 1, argument=lambda: 0)
"""


def test_ranks_that_an_argument_cannot_be_sent_to_do_not_keep_the_process_from_ending():
    command = [sys.executable, "-c", ARGUMENT_THAT_DOES_NOT_PICKLE]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert "Can't pickle" in ended.stderr
    assert ended.returncode == 1
