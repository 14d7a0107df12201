"""Jobs of torchrun: static, of two agents, and elastic ones that restart with as many or fewer ranks."""

import os
import signal
import socket
import subprocess

import pytest
from tests.clusters import checks
from tests.clusters.checks import JOB, PYTHON

pytestmark = pytest.mark.clusters

ENVIRON = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
LAST_CALL = "last_call_timeout=1"  # seconds that a rendezvous with fewer agents waits for others


@pytest.fixture
def torchrun(tmp_path):
    """Start agents of torchrun, and end them and their ranks after the test."""
    started = []

    def start(*arguments):
        error = (tmp_path / f"agent-{len(started)}.err").open("w")
        command = [PYTHON, "-m", "torch.distributed.run", *arguments]
        with error:
            process = subprocess.Popen(
                command, env=ENVIRON, stdout=subprocess.PIPE, stderr=error, text=True, start_new_session=True
            )
        process.error_path = tmp_path / f"agent-{len(started)}.err"
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()
    for pid in checks.processes_of(tmp_path / "job"):
        os.kill(pid, signal.SIGKILL)


def finish(process, timeout=120):
    """Return the exit code, and what it has printed to stdout and stderr."""
    out, _ = process.communicate(timeout=timeout)
    return process.returncode, out, process.error_path.read_text()


@pytest.mark.slow
def test_two_ranks_of_one_agent_train(torchrun, tmp_path, expected):
    folder = tmp_path / "job"
    agent = torchrun("--standalone", "--nproc-per-node=2", str(JOB), str(folder), "--devices=2")
    code, out, err = finish(agent)
    assert code == 0, err
    assert out == "trained 12 steps\n"
    assert checks.ranks(folder) == [(0, 0, 0), (1, 1, 0)]
    checks.check_losses(folder, expected)
    checks.check_no_survivors(folder)


@pytest.mark.slow
def test_two_agents_with_a_fixed_address_train(torchrun, tmp_path, expected):
    folder = tmp_path / "job"
    static = ("--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={checks.free_port()}")
    agents = [
        torchrun(
            f"--node-rank={node}", *static, str(JOB), str(folder), "--devices=2", "--num-nodes=2", "--strategy=fsdp"
        )
        for node in range(2)
    ]
    printed = [finish(agent) for agent in agents]
    assert [code for code, _, _ in printed] == [0, 0], printed
    assert [out for _, out, _ in printed] == ["trained 12 steps\n", ""]
    assert checks.ranks(folder) == [(0, 0, 0), (1, 1, 0), (2, 0, 1), (3, 1, 1)]
    checks.check_losses(folder, expected)
    checks.check_no_survivors(folder)


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["raise", "kill"])
def test_failing_rank_and_its_host_are_named(torchrun, tmp_path, failure):
    folder = tmp_path / "job"
    agent = torchrun("--standalone", "--nproc-per-node=2", str(JOB), str(folder), "--devices=2", f"--fail={failure}")
    code, _, err = finish(agent)
    assert code == 1
    root_cause = err.partition("Root Cause")[2]
    assert "rank      : 1 (local_rank: 1)" in root_cause
    assert f"host      : {socket.getfqdn()}" in root_cause
    assert ("ValueError: bad sample" if failure == "raise" else "Signal 9 (SIGKILL)") in root_cause
    checks.check_no_survivors(folder)


@pytest.mark.slow
@pytest.mark.parametrize("failure", ["raise", "kill"])
def test_restart_continues_from_the_newest_checkpoint(torchrun, tmp_path, expected, failure):
    folder = tmp_path / "job"
    elastic = ("--nproc-per-node=2", "--max-restarts=3", "--standalone")
    agent = torchrun(*elastic, str(JOB), str(folder), "--devices=2", f"--fail={failure}", "--fail-step=7")
    code, _, err = finish(agent)
    assert code == 0, err
    assert checks.read_identities(folder, attempt=1)[0]["begin"] == 6
    checks.check_losses(folder, expected)
    checks.check_samples(folder)
    checks.check_no_survivors(folder)


def elastic_agent(torchrun, folder, port, *arguments, is_host):
    """Start one of one or two agents with a rank each."""
    elastic = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--rdzv-backend=c10d", "--monitor-interval=1")
    meet = (f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=job", "--local-addr=127.0.0.1")
    conf = f"--rdzv-conf=is_host={str(is_host).lower()},{LAST_CALL}"
    return torchrun(*elastic, *meet, conf, str(JOB), str(folder), "--num-nodes=0", *arguments)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(), ("--shuffle",)])
def test_job_goes_on_with_fewer_ranks_when_an_agent_has_died(torchrun, tmp_path, expected, order):
    folder, port = tmp_path / "job", checks.free_port()
    agents = [elastic_agent(torchrun, folder, port, "--pause=0.3", *order, is_host=host) for host in (True, False)]
    checks.wait_for_step(folder, 5)
    agents[1].kill()  # which torchrun's ranks survive
    for pid in checks.processes_of(folder, parent=agents[1].pid):
        os.kill(pid, signal.SIGKILL)
    code, _, err = finish(agents[0])
    assert code == 0, err
    last = max(int(path.stem.split("-")[1]) for path in folder.glob("rank-*.jsonl"))
    assert checks.ranks(folder, last) == [(0, 0, 0)]
    assert checks.read_identities(folder, last)[0]["begin"] >= 4
    if not order:  # one process shuffles by torch's own sampler
        checks.check_losses(folder, expected)
    checks.check_samples(folder)
    checks.check_no_survivors(folder)


@pytest.mark.slow
@pytest.mark.parametrize("order", [(), ("--shuffle",)])
def test_job_goes_on_with_more_ranks_when_an_agent_has_joined(torchrun, tmp_path, monkeypatch, expected, order):
    # Otherwise the first agent does not repeat its address for those that join later.
    monkeypatch.setitem(ENVIRON, "TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    folder, port = tmp_path / "job", checks.free_port()
    first = elastic_agent(torchrun, folder, port, "--pause=2", *order, is_host=True)
    checks.wait_for_step(folder, 3)
    second = elastic_agent(torchrun, folder, port, "--pause=2", *order, is_host=False)
    printed = [finish(agent) for agent in (first, second)]
    assert [code for code, _, _ in printed] == [0, 0], printed
    assert checks.ranks(folder, 0) == [(0, 0, 0)]
    assert sorted(rank for rank, _, _ in checks.ranks(folder, 1)) == [0, 1]
    assert checks.read_identities(folder, 1)[0]["begin"] >= 2
    if not order:
        checks.check_losses(folder, expected)
    checks.check_samples(folder)
    checks.check_no_survivors(folder)
