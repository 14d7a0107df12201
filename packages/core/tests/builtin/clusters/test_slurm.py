"""Tasks that srun started; the dictionaries are what SLURM 22.05 sets."""

import signal

import pytest

from dstrat.builtin.clusters.slurm import SLURMEnvironment
from dstrat.errors import ClusterError, RequestError

BATCH_SCRIPT = {
    "ENVIRONMENT": "BATCH",
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NAME": "train.sh",
    "SLURM_JOB_NODELIST": "n[1-2].invalid",
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_LOCALID": "0",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "0",
    "SLURM_TASKS_PER_NODE": "2(x2)",
}
LAST_TASK = {
    **BATCH_SCRIPT,
    "SLURM_LAUNCH_NODE_IPADDR": "192.0.2.7",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "3",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-2].invalid",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
}
ONE_MACHINE = {
    **LAST_TASK,
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NODELIST": "n1.invalid",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_TASKS_PER_NODE": "2",
}
SALLOC_SHELL = {
    "SLURM_JOB_ID": "42",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_JOB_NODELIST": "n[1-2]",
    "SLURM_NNODES": "2",
    "SLURM_NTASKS": "2",
}
PTY_SHELL = {  # of salloc with use_interactive_step; that of srun --pty has the step 0 and the name bash
    **ONE_MACHINE,
    "SLURM_JOB_NAME": "interactive",
    "SLURM_PROCID": "0",
    "SLURM_PTY_PORT": "35611",
    "SLURM_STEP_ID": "4294967290",
    "SLURM_STEP_NUM_TASKS": "1",
    "SLURM_STEP_TASKS_PER_NODE": "1",
}


def without(environ, *names):
    return {name: value for name, value in environ.items() if name not in names}


def refusal(environ, *, num_devices=2, num_nodes=2):
    with pytest.raises(ClusterError) as caught:
        SLURMEnvironment(environ).validate(num_devices=num_devices, num_nodes=num_nodes)
    return str(caught.value)


def test_reads_the_ranks_of_a_task():
    cluster = SLURMEnvironment(LAST_TASK)
    cluster.validate(num_devices=2, num_nodes=2)
    assert (cluster.world_size, cluster.global_rank, cluster.local_rank, cluster.node_rank) == (4, 3, 1, 1)


def test_a_step_is_the_evidence():
    assert SLURMEnvironment.evidence(LAST_TASK) == "SLURM_STEP_ID is set"
    assert SLURMEnvironment.evidence({}) is None


def test_a_batch_script_with_several_tasks_must_use_srun():
    assert SLURMEnvironment.evidence(BATCH_SCRIPT) == "SLURM_NTASKS is set in a batch script"
    assert refusal(BATCH_SCRIPT) == (
        "SLURM_STEP_ID is not set, so this process is none of the job's tasks (SLURM_NTASKS is '4'): put srun before "
        "python, or choose the cluster environment 'local' to start processes on this machine only"
    )


@pytest.mark.parametrize("environ", [without(BATCH_SCRIPT, "SLURM_NTASKS"), {**BATCH_SCRIPT, "SLURM_NTASKS": "1"}])
def test_a_batch_script_with_one_task_starts_its_own_processes(environ):
    assert SLURMEnvironment.evidence(environ) is None


@pytest.mark.parametrize(
    "environ",
    [
        SALLOC_SHELL,
        {**SALLOC_SHELL, "SLURM_JOB_NAME": "train"},
        PTY_SHELL,
        {**PTY_SHELL, "SLURM_JOB_NAME": "bash", "SLURM_STEP_ID": "0"},
        without({**PTY_SHELL, "SLURM_JOB_NAME": "bash"}, "SLURM_PTY_PORT"),
    ],
)
def test_an_interactive_shell_starts_its_own_processes(environ):
    assert SLURMEnvironment.evidence(environ) is None
    assert "put srun before python" in refusal(environ)


@pytest.mark.parametrize(
    "shell", [{"SLURM_JOB_NAME": "interactive"}, {"SLURM_JOB_NAME": "bash"}, {"SLURM_PTY_PORT": "35611"}]
)
def test_what_a_shell_starts_with_srun_is_a_task_though_it_inherits_the_shells_variables(shell):
    environ = {**LAST_TASK, **shell}
    assert SLURMEnvironment.evidence(environ) == "SLURM_STEP_ID is set"
    SLURMEnvironment(environ).validate(num_devices=2, num_nodes=2)


def test_a_wrong_number_of_tasks_is_refused_with_the_command():
    assert refusal(LAST_TASK, num_devices=4) == (
        "SLURM_NTASKS is 4, and devices=4 with num_nodes=2 needs 8: start with srun --nodes=2 --ntasks-per-node=4, "
        "or pass the devices and num_nodes that were started"
    )


def test_the_right_number_of_tasks_on_other_machines_is_refused():
    assert refusal(LAST_TASK, num_devices=4, num_nodes=1).startswith("SLURM_NNODES is 2, and devices=4 with")


def test_tasks_that_are_spread_unevenly_are_refused_on_every_machine():
    for rank in "0", "3":
        environ = {**LAST_TASK, "SLURM_PROCID": rank, "SLURM_STEP_TASKS_PER_NODE": "3,1", "SLURM_NODEID": "0"}
        assert refusal(environ).startswith("SLURM_STEP_TASKS_PER_NODE is 3,1, and devices=2")


def test_ranks_may_be_dealt_out_in_any_order():
    cyclic = {**LAST_TASK, "SLURM_PROCID": "1", "SLURM_LOCALID": "0", "SLURM_NODEID": "1"}
    SLURMEnvironment(cyclic).validate(num_devices=2, num_nodes=2)


@pytest.mark.parametrize("name", ["SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NNODES", "SLURM_JOB_ID"])
def test_a_missing_variable_is_named(name):
    assert refusal(without(LAST_TASK, name)).startswith(f"{name} is not set: start the script with srun")


def test_a_variable_that_is_no_number_is_shown():
    assert refusal({**LAST_TASK, "SLURM_NTASKS": "four"}).startswith("SLURM_NTASKS is 'four', and must be")


def test_rank_0_is_on_the_first_machine_of_the_step():
    cluster = SLURMEnvironment({**LAST_TASK, "SLURM_STEP_NODELIST": "localhost,n2"})
    assert cluster.main_address == "localhost"
    assert (
        SLURMEnvironment(
            {**without(LAST_TASK, "SLURM_STEP_NODELIST"), "SLURM_JOB_NODELIST": "localhost,n2"}
        ).main_address
        == "localhost"
    )


def test_one_machine_needs_no_name():
    cluster = SLURMEnvironment(ONE_MACHINE)
    cluster.validate(num_devices=2, num_nodes=1)
    assert cluster.main_address == "127.0.0.1"


def test_a_name_without_an_address_gives_way_to_the_address_of_the_batch_script():
    assert SLURMEnvironment(LAST_TASK).main_address == "192.0.2.7"


@pytest.mark.parametrize(
    "elsewhere",
    [{"ENVIRONMENT": ""}, {"SLURM_LAUNCH_NODE_IPADDR": ""}, {"SLURM_STEP_NODELIST": "n2.invalid,n3.invalid"}],
)
def test_a_name_without_an_address_is_an_error_when_the_first_machine_is_another(elsewhere):
    with pytest.raises(ClusterError, match=r"machine of rank 0, and this machine finds no address of that name: set"):
        _ = SLURMEnvironment({**LAST_TASK, **elsewhere}).main_address


def test_a_list_of_machines_that_cannot_be_read_is_found_before_the_start():
    assert "does not begin with a host" in refusal({**LAST_TASK, "SLURM_STEP_NODELIST": "n["})


def test_address_and_port_can_be_set():
    cluster = SLURMEnvironment({**LAST_TASK, "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "5000"})
    assert (cluster.main_address, cluster.main_port) == ("10.0.0.1", 5000)


def test_the_port_follows_from_job_and_step():
    ports = {
        SLURMEnvironment({**LAST_TASK, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": step}).main_port
        for job in range(12_345_000, 12_345_100)
        for step in "01"
    }
    assert len(ports) == 200
    assert all(15000 <= port < 30000 for port in ports)
    assert SLURMEnvironment(LAST_TASK).main_port == 15042


# Queueing a job again; tests/clusters does it on SLURM itself


@pytest.fixture
def scontrol(tmp_path):
    """Return variables with which scontrol is a program that writes its arguments, and ends as it is told."""

    def make(exit_code=0, error=""):
        program = tmp_path / "scontrol"
        program.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/arguments\necho '{error}' >&2\nexit {exit_code}\n")
        program.chmod(0o755)
        return {**LAST_TASK, "PATH": f"{tmp_path}:/usr/bin:/bin"}

    return make


def test_job_is_queued_again_only_on_request():
    assert SLURMEnvironment(LAST_TASK).requeue_signal is None
    assert SLURMEnvironment(LAST_TASK, auto_requeue=True).requeue_signal == signal.SIGUSR1
    cluster = SLURMEnvironment(LAST_TASK, auto_requeue=True, requeue_signal=signal.SIGHUP)
    assert cluster.requeue_signal == signal.SIGHUP


def test_requeue_names_the_job_and_of_an_array_the_task(scontrol, tmp_path):
    SLURMEnvironment(scontrol(), auto_requeue=True).requeue()
    assert (tmp_path / "arguments").read_text() == "requeue 42\n"
    task = {**scontrol(), "SLURM_ARRAY_JOB_ID": "42", "SLURM_ARRAY_TASK_ID": "7"}
    SLURMEnvironment(task, auto_requeue=True).requeue()
    assert (tmp_path / "arguments").read_text() == "requeue 42_7\n"


def test_refused_requeue_says_what_to_do(scontrol):
    environ = scontrol(1, "Requested operation is presently disabled")
    with pytest.raises(ClusterError, match="'Requested operation is presently disabled': submit it again, with sbatch"):
        SLURMEnvironment(environ, auto_requeue=True).requeue()
    with pytest.raises(ClusterError, match=r"job 42 is not queued again: .*No such file.*; submit it again"):
        SLURMEnvironment({**LAST_TASK, "PATH": "/nowhere"}, auto_requeue=True).requeue()


def test_signals_that_stop_no_job_are_refused():
    with pytest.raises(RequestError, match="does not stop a job: choose one of SIGUSR1, SIGTERM, SIGHUP"):
        SLURMEnvironment(LAST_TASK, auto_requeue=True, requeue_signal=signal.SIGUSR2)
    with pytest.raises(RequestError, match="has no effect: add auto_requeue=True"):
        SLURMEnvironment(LAST_TASK, requeue_signal=signal.SIGUSR1)


def test_restarts_of_the_job_are_its_attempts():
    assert SLURMEnvironment(LAST_TASK).attempt == 0
    assert SLURMEnvironment({**LAST_TASK, "SLURM_RESTART_COUNT": "2"}).attempt == 2
