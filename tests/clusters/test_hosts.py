"""Jobs on two hosts: addresses, the interface between them, a link that is slow, and a host that disappears."""

import os
import signal
import time

import pytest
from tests.clusters import checks, hosts
from tests.clusters.checks import JOB, PYTHON

pytestmark = [pytest.mark.clusters, pytest.mark.slow]


@pytest.fixture
def two_hosts(tmp_path):
    if reason := hosts.missing_program():
        pytest.skip(reason)
    with hosts.Hosts() as two:
        yield two
        for pid in checks.processes_of(tmp_path / "job"):
            os.kill(pid, signal.SIGKILL)


def start_job(two_hosts, folder, *arguments, **environ):
    """Start a rank on each host by the variables of torch.distributed, as many schedulers do."""
    address = {"MASTER_ADDR": two_hosts.addresses[0], "MASTER_PORT": "29400", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    command = [PYTHON, str(JOB), str(folder), "--num-nodes=2", *arguments]
    return [
        two_hosts.start(number, command, **address, RANK=str(number), NODE_RANK=str(number), **environ)
        for number in range(2)
    ]


def finish(processes, timeout=150):
    """Return the exit code of each process, and what it has printed."""
    printed = [process.communicate(timeout=timeout) for process in processes]
    return [(process.returncode, *texts) for process, texts in zip(processes, printed, strict=True)]


def test_hosts_find_the_interface_between_them(two_hosts, tmp_path, expected):
    folder = tmp_path / "job"
    ends = finish(start_job(two_hosts, folder))
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert [out for _, out, _ in ends] == ["trained 12 steps\n", ""]
    assert checks.ranks(folder) == [(0, 0, 0), (1, 0, 1)]
    assert [identity["host"] for identity in checks.read_identities(folder)] == ["alpha", "beta"]
    checks.check_losses(folder, expected)
    checks.check_no_survivors(folder)


def test_agents_of_torchrun_meet_at_an_address(two_hosts, tmp_path, expected):
    folder = tmp_path / "job"
    command = [PYTHON, "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=2"]
    address = ("--master-addr=10.213.7.1", "--master-port=29400")
    job = (str(JOB), str(folder), "--devices=2", "--num-nodes=2", "--strategy=fsdp")
    agents = [two_hosts.start(node, [*command, f"--node-rank={node}", *address, *job]) for node in range(2)]
    ends = finish(agents)
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert checks.ranks(folder) == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    checks.check_losses(folder, expected)
    checks.check_no_survivors(folder)


@pytest.mark.parametrize("rank", [0, 1])
def test_failure_on_another_host_is_named_with_the_host(two_hosts, tmp_path, rank):
    folder = tmp_path / "job"
    ends = finish(start_job(two_hosts, folder, "--fail=raise", f"--fail-rank={rank}"))
    assert [code for code, _, _ in ends] == [1, 1]
    assert "ValueError: bad sample" in ends[rank][2]
    host = hosts.Hosts.names[rank]
    named = f"rank {rank} of 2 on '{host}' has failed: ValueError: bad sample"
    if rank == 0:  # it serves the store, and may have ended with it
        silent = ("rank 0 of 2 on 'alpha' does not respond", "rank 0 at 10.213.7.1:29400 does not respond")
        assert any(text in ends[1][2] for text in (named, *silent))
    else:
        assert named in ends[0][2]
    checks.check_no_survivors(folder)


def test_rank_that_is_killed_on_another_host_is_named(two_hosts, tmp_path):
    folder = tmp_path / "job"
    ends = finish(start_job(two_hosts, folder, "--fail=kill"))
    assert [code for code, _, _ in ends] == [1, -9]
    assert "rank 1 of 2 on 'beta' has reported no failure: it was killed, or its machine is not" in ends[0][2]
    checks.check_no_survivors(folder)


def test_host_that_disappears_ends_the_job_after_the_timeout(two_hosts, tmp_path):
    folder = tmp_path / "job"
    processes = start_job(two_hosts, folder, "--pause=0.2", "--max-epochs=50", "--timeout=15")
    checks.wait_for_step(folder, 4)
    two_hosts.cut()
    ends = finish(processes)
    assert all(code == 1 for code, _, _ in ends)
    assert "rank 1 of 2 on 'beta' has reported no failure" in ends[0][2]
    assert "rank 0 at 10.213.7.1:29400 does not respond" in ends[1][2]
    checks.check_no_survivors(folder)


def test_short_interruption_of_the_link_is_survived(two_hosts, tmp_path, expected):
    folder = tmp_path / "job"
    processes = start_job(two_hosts, folder, "--pause=0.2")
    checks.wait_for_step(folder, 4)
    two_hosts.cut()
    time.sleep(3)
    two_hosts.mend()
    ends = finish(processes)
    assert [code for code, _, _ in ends] == [0, 0], ends
    checks.check_losses(folder, expected)


def test_slow_link_changes_no_loss(two_hosts, tmp_path, expected):
    two_hosts.slow_down("256kbit")
    folder = tmp_path / "job"
    ends = finish(start_job(two_hosts, folder))
    assert [code for code, _, _ in ends] == [0, 0], ends
    checks.check_losses(folder, expected)
