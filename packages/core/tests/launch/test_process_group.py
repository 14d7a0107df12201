"""Ranks with a process group: who is to blame, and where they listen."""

import os
import socket
from datetime import timedelta

import pytest
import torch
from tests.warm_program import WarmProgram

from dstrat.builtin.clusters.local import LocalEnvironment
from dstrat.errors import LaunchError, RankFailedError
from dstrat.launch.local import LocalLauncher
from dstrat.parallel.process_group import open_process_group


@pytest.fixture
def launch(rank_functions, tmp_path, monkeypatch):
    def launch(name, *args, num_processes=2, start_method="forkserver"):
        launcher = LocalLauncher(num_processes=num_processes, start_method=start_method)
        return launcher.launch(getattr(rank_functions, name), *args)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    yield launch
    assert list(tmp_path.glob("dstrat-job-*")) == []


@pytest.fixture
def unused_port():
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))  # and listens to nobody
        yield held.getsockname()[1]


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


def test_fork_server_has_imported_what_every_first_optimizer_imports(tmp_path, rank_functions):
    """It takes each rank as long as the import of torch, which a fork server is there to save."""
    (tmp_path / "script.py").write_text(
        "import rank_functions\n"
        "from dstrat.launch.local import LocalLauncher\n"
        "if __name__ == '__main__':\n"
        "    print(LocalLauncher(num_processes=1, start_method='forkserver').launch(rank_functions.has_compiler))\n"
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
        "from dstrat.launch.local import LocalLauncher\n"
        "result = LocalLauncher(num_processes=1, num_nodes=2, start_method='fork').launch(rank_functions.add_up, 1.0)\n"
        "print(result and result['sum'].tolist())\n"
    )
    second, first = [WarmProgram(tmp_path / "script.py", rank, port) for rank in ("1", "0")]
    assert (first.run(), second.run()) == ("[3.0, 3.0, 3.0]\n", "None\n")


def test_workers_of_a_rank_know_it(launch):
    assert launch("rank_in_worker") == [[0, 2]]


def test_ranks_listen_on_the_loopback_only(launch):
    addresses = launch("listeners")
    assert len(addresses) >= 2  # Gloo's own
    assert set(addresses) == {"0100007F"}


def test_supervisor_keeps_no_port_open(launch, rank_functions):
    of_other_tests = rank_functions.listening_addresses()
    assert launch("listeners_of_the_supervisor", start_method="fork") == of_other_tests


def test_rank_that_hangs_is_named_with_its_stack(launch):
    with pytest.raises(
        RankFailedError, match=r"rank 1 of 2 hung: rank 0 timed out waiting for it \(RuntimeError"
    ) as caught:
        launch("get_stuck")
    assert "in fall_asleep" in caught.value.rank_traceback.splitlines()[1]
    assert caught.value.rank == 1
    assert caught.value.exit_code is None


def test_rank_that_hangs_after_it_has_failed_is_said_to_have_failed(launch):
    with pytest.raises(RankFailedError, match="rank 1 of 2 failed: ValueError: boom") as caught:
        launch("hang_in_the_cleanup")
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)


def test_rank_for_which_a_watchdog_aborted_another_is_named(launch):
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 hung: rank 0 was aborted while it waited for it") as caught:
        launch("abort_like_a_watchdog", start_method="fork")
    assert "in fall_asleep" in caught.value.rank_traceback
    assert "Stack of rank 0 when it was aborted:" in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_that_never_arrives_is_named_with_its_stack(launch, rank):
    with pytest.raises(RankFailedError, match=f"rank {rank} of 2 hung: rank {1 - rank} timed out waiting") as caught:
        launch("never_arrive", rank)
    assert "in fall_asleep" in caught.value.rank_traceback
    assert f"timed out waiting for rank {rank} of 2, which did not come to open the process" in str(caught.value)


def test_rank_zero_that_does_not_listen_is_named_on_another_machine(unused_port):
    environ = {
        "DSTRAT_JOB": "/nowhere", "DSTRAT_RANK_PID": str(os.getpid()), "RANK": "1", "WORLD_SIZE": "2",
        "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(unused_port),
    }  # fmt: skip
    with pytest.raises(LaunchError, match=rf"rank 0 of 2, which did not listen on 127.0.0.1:{unused_port} within 1 s"):
        open_process_group(LocalEnvironment(environ), backend="gloo", timeout=timedelta(seconds=1))


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


@pytest.mark.parametrize("way", ["return", "sys.exit()", "sys.exit(0)", "os._exit"])
def test_rank_that_left_early_is_named_and_not_the_one_that_loses_it(launch, way):
    with pytest.raises(RankFailedError, match="rank 1 of 2 exited with code 0 before the others had ended") as caught:
        launch("leave_early", way)
    assert "Traceback of rank 0:\n\nTraceback (most recent call last)" in str(caught.value)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raise_what_sounds_like_a_lost_peer", "cannot read the shard: Connection reset by peer"),
        ("wait_for_data_too_long", "DataLoader timed out after 1"),
    ],
)
def test_error_that_only_sounds_like_a_lost_peer_is_the_rank_s_own(launch, function, message):
    with pytest.raises(RankFailedError, match=f"rank 1 of 2 failed: RuntimeError: {message}") as caught:
        launch(function)
    assert f"in {function}" in caught.value.rank_traceback


def test_rank_that_waits_for_others_to_start_stops_with_the_job(rank_functions):
    launcher = LocalLauncher(num_processes=2, start_method="forkserver", stop_grace=600)
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(rank_functions.stop_before_all_have_come, os.getpid())


def test_next_launch_works_after_a_failed_one(launch):
    with pytest.raises(RankFailedError):
        launch("die_while_others_wait")
    assert launch("add_up", 1.0)["sum"][0] == 3


def test_result_that_cannot_be_pickled_is_named(launch):
    with pytest.raises(RankFailedError, match=r"result\['metrics'\]\[1\] \(function\) cannot be pickled"):
        launch("return_lambda")
