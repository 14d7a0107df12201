"""Ranks with a process group: who is to blame, and where they listen."""

import time

import pytest
import torch

from dstrat.builtin.launchers.local import LocalLauncher
from dstrat.errors import RankFailedError


@pytest.fixture
def launch(rank_functions, tmp_path, monkeypatch):
    def launch(name, *args, num_processes=2, start_method="forkserver"):
        launcher = LocalLauncher(num_processes=num_processes, start_method=start_method)
        return launcher.launch(getattr(rank_functions, name), *args)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield launch
    assert list(tmp_path.glob("dstrat-job-*")) == []


@pytest.mark.parametrize("start_method", ["forkserver", "spawn", "fork"])
def test_ranks_meet_and_tensors_come_back(launch, start_method):
    result = launch("add_up", 2.0, start_method=start_method)
    assert torch.equal(result["sum"], torch.full((3,), 6.0))


def test_tensors_that_share_memory_still_do_so(launch):
    whole, part = launch("views")
    part.zero_()
    assert whole[15] == 0
    assert whole[25] == 25


def test_ranks_listen_on_the_loopback_only(launch):
    addresses = launch("listeners")
    assert len(addresses) >= 2
    assert set(addresses) == {"0100007F"}


def test_rank_that_hangs_is_named_with_its_stack(launch):
    start = time.monotonic()
    with pytest.raises(
        RankFailedError, match=r"rank 1 of 2 hung: rank 0 waited for it in vain \(RuntimeError"
    ) as caught:
        launch("get_stuck")
    assert time.monotonic() - start < 6
    assert "in fall_asleep" in caught.value.rank_traceback
    assert caught.value.rank == 1
    assert caught.value.exit_code is None


def test_rank_that_never_arrives_is_named_with_its_stack(launch):
    with pytest.raises(RankFailedError, match="rank 1 of 2 hung") as caught:
        launch("never_arrive")
    assert "in fall_asleep" in caught.value.rank_traceback


def test_rank_that_raises_is_named_and_not_those_that_lose_it(launch):
    for _ in range(3):
        with pytest.raises(RankFailedError, match="rank 2 of 4 failed: ValueError: boom") as caught:
            launch("raise_while_others_wait", num_processes=4)
        assert "Connection" not in str(caught.value)


def test_rank_that_is_killed_is_named_and_not_the_one_that_loses_it(launch):
    for _ in range(3):
        with pytest.raises(RankFailedError, match="rank 1 of 2 was killed by SIGKILL"):
            launch("die_while_others_wait")


def test_rank_that_left_early_is_mentioned(launch):
    with pytest.raises(RankFailedError, match=r"rank 0 of 2 failed: RuntimeError.*\n\(rank 1 had ended before"):
        launch("leave_early")


def test_next_launch_works_after_a_failed_one(launch):
    with pytest.raises(RankFailedError):
        launch("die_while_others_wait")
    assert launch("add_up", 1.0)["sum"][0] == 3


def test_result_that_cannot_be_pickled_is_named(launch):
    with pytest.raises(RankFailedError, match=r"result\['metrics'\]\[1\] \(function\) cannot be pickled"):
        launch("return_lambda")
