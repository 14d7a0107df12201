"""Ranks with a process group: who is to blame, and where they listen."""

import socket

import pytest
import torch
from tests.warm_program import WarmProgram

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


def test_forked_ranks_compute_after_the_parent_has_used_its_threads(tmp_path, rank_functions):
    """Without care they wait for threads that only the parent has."""
    (tmp_path / "script.py").write_text(
        "import torch\n"
        "from train import launcher\n"
        "torch.set_num_threads(2)\n"
        "def multiply(): return (torch.ones(1500, 1500) @ torch.ones(1500, 1500)).sum().item()\n"
        "print(multiply() == launcher('fork').launch(multiply))\n"
    )
    assert WarmProgram(tmp_path / "script.py").run() == "True\n"


def test_job_on_two_machines_is_started_on_each_by_hand(tmp_path, rank_functions):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    (tmp_path / "script.py").write_text(
        "import os, sys\n"
        "names = ('NODE_RANK', 'MASTER_PORT', 'MASTER_ADDR', 'GLOO_SOCKET_IFNAME')\n"
        "os.environ |= zip(names, (*sys.argv[1:], '127.0.0.1', 'lo'), strict=True)\n"
        "import rank_functions\n"
        "from dstrat.builtin.launchers.local import LocalLauncher\n"
        "result = LocalLauncher(num_processes=1, num_nodes=2, start_method='fork').launch(rank_functions.add_up, 1.0)\n"
        "print(result and result['sum'].tolist())\n"
    )
    second, first = [WarmProgram(tmp_path / "script.py", rank, port) for rank in ("1", "0")]
    assert (first.run(), second.run()) == ("[3.0, 3.0, 3.0]\n", "None\n")


def test_workers_of_a_rank_know_it(launch):
    assert launch("rank_in_worker") == [[0, 2]]


def test_ranks_listen_on_the_loopback_only(launch):
    addresses = launch("listeners")
    assert len(addresses) >= 2
    assert set(addresses) == {"0100007F"}


def test_supervisor_keeps_no_port_open(launch, rank_functions):
    of_other_tests = rank_functions.listening_addresses()
    assert launch("listeners_of_the_supervisor", start_method="fork") == of_other_tests


def test_rank_that_hangs_is_named_with_its_stack(launch):
    with pytest.raises(
        RankFailedError, match=r"rank 1 of 2 hung: rank 0 waited for it in vain \(RuntimeError"
    ) as caught:
        launch("get_stuck")
    assert "in fall_asleep" in caught.value.rank_traceback.splitlines()[1]
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


def test_rank_that_raises_later_than_the_others_lose_it_is_named(launch):
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: ValueError: boom"):
        launch("raise_after_hanging_up")


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
