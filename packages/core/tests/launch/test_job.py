"""What a job sets up, and the environment of its ranks."""

import fcntl
import os
import socket
import stat
import tempfile

import pytest

from dstrat.errors import LaunchError
from dstrat.launch.job import open_job, threads_per_rank


@pytest.fixture(autouse=True)
def _nothing_is_set(monkeypatch):
    for name in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)


def variables(local_rank=0, num_processes=2, num_nodes=1, **environ):
    with open_job(num_processes=num_processes, num_nodes=num_nodes, environ=environ) as job:
        return job.rank_environment(local_rank)


def test_ranks_have_the_variables_that_torch_and_others_read():
    found = variables(1)
    assert found["RANK"] == found["LOCAL_RANK"] == "1"
    assert found["WORLD_SIZE"] == found["LOCAL_WORLD_SIZE"] == "2"
    assert found["NODE_RANK"] == "0"
    assert found["MASTER_ADDR"] == "127.0.0.1"
    assert int(found["MASTER_PORT"]) > 0
    assert found["GLOO_SOCKET_IFNAME"] == found["NCCL_SOCKET_IFNAME"] == "lo"


def test_failures_reach_other_machines_of_a_job():
    environ = {"MASTER_ADDR": "head", "MASTER_PORT": "29500", "NODE_RANK": "1"}
    assert variables(num_nodes=2, **environ)["TORCH_NCCL_PROPAGATE_ERROR"] == "1"
    assert "TORCH_NCCL_PROPAGATE_ERROR" not in variables()


def test_a_job_that_reaches_others_is_not_kept_on_the_loopback():
    with open_job(num_processes=2, num_nodes=1, environ={}, reaches_other_jobs=True) as job:
        found = job.rank_environment(0)
    assert not {"GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"} & found.keys()


def test_what_the_user_has_set_is_kept():
    found = variables(OMP_NUM_THREADS="3", GLOO_SOCKET_IFNAME="eth0")
    assert found["OMP_NUM_THREADS"] == "3"
    assert found["GLOO_SOCKET_IFNAME"] == "eth0"
    assert found["NCCL_SOCKET_IFNAME"] == "lo"


def test_threads_fill_the_processors_and_no_more():
    usable = len(os.sched_getaffinity(0))
    assert threads_per_rank(1) == usable
    assert threads_per_rank(2) == max(1, usable // 2)
    assert threads_per_rank(10 * usable) == 1


def test_ranks_on_several_machines_are_counted_machine_by_machine():
    found = variables(1, num_nodes=3, MASTER_ADDR="head", MASTER_PORT="29500", NODE_RANK="2")
    assert (found["RANK"], found["LOCAL_RANK"], found["WORLD_SIZE"], found["NODE_RANK"]) == ("5", "1", "6", "2")
    assert (found["MASTER_ADDR"], found["MASTER_PORT"]) == ("head", "29500")
    assert "GLOO_SOCKET_IFNAME" not in found


def test_two_jobs_at_once_have_different_ports():
    assert variables()["MASTER_PORT"] != "0"
    with open_job(num_processes=1, num_nodes=1, environ={}) as first:
        assert variables()["MASTER_PORT"] != str(first.port)


def test_job_inside_a_rank_does_not_take_the_port_of_the_outer_one():
    with socket.create_server(("127.0.0.1", 0)) as outer:
        port = str(outer.getsockname()[1])
        assert variables(MASTER_PORT=port, DSTRAT_JOB="/outer")["MASTER_PORT"] != port
        with pytest.raises(LaunchError, match=f"MASTER_PORT is {port}"):
            variables(MASTER_PORT=port)


def test_nothing_of_the_rank_that_has_started_a_job_reaches_its_ranks():
    found = variables(1, DSTRAT_JOB="/outer", DSTRAT_RANK_PID="1", RANK="5", WORLD_SIZE="9")
    assert "DSTRAT_RANK_PID" not in found
    assert (found["RANK"], found["WORLD_SIZE"]) == ("1", "2")
    assert found["DSTRAT_JOB"] != "/outer"


@pytest.mark.parametrize("value", ["", "nine", "-1", "1e3", "65536", " 80", "٣"])
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_value_that_is_no_port_is_refused(value, num_nodes):
    with pytest.raises(LaunchError, match="and must be a port, from 1 to 65535: unset MASTER_PORT") as caught:
        variables(num_nodes=num_nodes, MASTER_ADDR="head", NODE_RANK="0", MASTER_PORT=value)
    assert f"MASTER_PORT is {value!r}" in str(caught.value)


def test_nobody_can_connect_to_the_port_of_a_job_that_meets_through_a_file():
    with open_job(num_processes=2, num_nodes=1, environ={}) as job:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((job.address, job.port))
        with socket.create_server(("", job.port)):  # and a script's own process group can
            pass


def test_folder_is_private_and_goes_with_the_job():
    with open_job(num_processes=1, num_nodes=1, environ={}) as job:
        assert stat.S_IMODE(job.folder.stat().st_mode) == 0o700
    assert not job.folder.exists()


def test_folder_is_locked_as_cleaners_of_temporary_files_respect():
    with open_job(num_processes=1, num_nodes=1, environ={}) as job:
        other = os.open(job.folder, os.O_RDONLY)
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.close(other)


def test_folders_that_nobody_has_locked_for_an_hour_are_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folders = {name: tmp_path / f"dstrat-job-{name}" for name in ("stale", "locked", "new")}
    for name, folder in folders.items():
        folder.mkdir()
        (folder / "file").touch()
        if name != "new":
            os.utime(folder, (0, 0))
    (tmp_path / "dstrat-job-link").symlink_to(folders["new"])
    descriptor = os.open(folders["locked"], os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH)
        variables()
    finally:
        os.close(descriptor)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "dstrat-job-link",
        "dstrat-job-locked",
        "dstrat-job-new",
    ]
