"""Jobs on a SLURM cluster of two nodes: srun, batch scripts, scancel, requeues, and a node that goes down."""

import re
import shlex

import pytest
from tests.clusters import checks
from tests.clusters.checks import JOB, PYTHON
from tests.test_guides import blocks

pytestmark = [pytest.mark.clusters, pytest.mark.slow]

JOB_COMMAND = f"{PYTHON} {JOB}"
LOCAL = {"MASTER_ADDR": "127.0.0.1"}  # srun from outside of a batch script, on nodes whose names do not resolve


def srun(cluster, folder, *arguments, tasks_per_node=1):
    command = ("srun", "--nodes=2", f"--ntasks-per-node={tasks_per_node}", PYTHON, str(JOB), str(folder))
    options = (f"--devices={tasks_per_node}", "--num-nodes=2")
    return cluster.call(*command, *options, *arguments, **LOCAL)


def write_script(folder, *lines, nodes=2, tasks_per_node=1, options=()):
    path = folder / "job.sbatch"
    settings = (f"--nodes={nodes}", f"--ntasks-per-node={tasks_per_node}", *options)
    path.write_text("\n".join(["#!/bin/bash", *(f"#SBATCH {setting}" for setting in settings), *lines, ""]))
    return path


def output(script, job):
    return (script.parent / f"slurm-{job}.out").read_text()


@pytest.mark.parametrize(("strategy", "tasks_per_node"), [("ddp", 1), ("fsdp", 2)])
def test_srun_trains_on_two_nodes(cluster, tmp_path, expected, strategy, tasks_per_node):
    done = srun(cluster, tmp_path / "job", f"--strategy={strategy}", tasks_per_node=tasks_per_node)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained 12 steps\n"  # of rank 0 alone
    of_ranks = [(rank, rank % tasks_per_node, rank // tasks_per_node) for rank in range(2 * tasks_per_node)]
    assert checks.ranks(tmp_path / "job") == of_ranks
    nodes = [identity["slurm_node"] for identity in checks.read_identities(tmp_path / "job")]
    assert nodes == [f"n{1 + node}" for _, _, node in of_ranks]
    checks.check_losses(tmp_path / "job", expected)
    checks.check_samples(tmp_path / "job")
    checks.check_no_survivors(tmp_path / "job")


@pytest.mark.parametrize("failure", ["raise", "kill"])
def test_failing_rank_and_its_node_are_named(cluster, tmp_path, failure):
    done = srun(cluster, tmp_path / "job", f"--fail={failure}")
    assert done.returncode != 0
    if failure == "raise":
        assert "[rank1]: ValueError: bad sample" in done.stderr
        assert "srun: error: n2: task 1: Exited with exit code 1" in done.stderr
    else:
        assert "srun: error: n2: task 1: Killed" in done.stderr
        assert "rank 1 of 2 has ended already" in done.stderr
    checks.check_no_survivors(tmp_path / "job")


def test_names_of_nodes_that_do_not_resolve_are_an_error_that_says_what_to_set(cluster, tmp_path):
    done = cluster.call("srun", "--nodes=2", PYTHON, str(JOB), str(tmp_path / "job"), "--num-nodes=2")
    assert done.returncode != 0
    assert "SLURM names 'n1' as the machine of rank 0, and this machine finds no address of that name" in done.stderr


def test_plain_python_in_a_batch_script_of_one_task_starts_its_own_processes(cluster, tmp_path, expected):
    script = write_script(tmp_path, f"{JOB_COMMAND} {tmp_path / 'job'} --devices=2", nodes=1)
    job = cluster.submit(script)
    cluster.wait_for_state(job, "COMPLETED")
    assert checks.ranks(tmp_path / "job") == [(0, 0, 0), (1, 1, 0)]
    checks.check_losses(tmp_path / "job", expected)


def test_plain_python_in_a_batch_script_of_several_tasks_is_an_error(cluster, tmp_path):
    script = write_script(tmp_path, f"{JOB_COMMAND} {tmp_path / 'job'} --num-nodes=2")
    job = cluster.submit(script)
    cluster.wait_for_state(job, "FAILED")
    assert "SLURM_NTASKS is '2'): put srun before python" in output(script, job)


def test_scancel_ends_all_ranks_with_a_checkpoint(cluster, tmp_path):
    command = f"srun {JOB_COMMAND} {tmp_path / 'job'} --num-nodes=2 --pause=0.2 --max-epochs=50 --deadline=4"
    script = write_script(tmp_path, command)
    job = cluster.submit(script)
    checks.wait_for_step(tmp_path / "job", 3)
    cluster.run("scancel", job)
    cluster.wait_for_state(job, "CANCELLED")
    checks.check_no_survivors(tmp_path / "job")
    (saved,) = (tmp_path / "job").glob("**/on_exception.ckpt")
    assert (saved / "manifest.json").exists()
    assert not list((tmp_path / "job").glob("**/.dstrat-*.tmp"))


@pytest.mark.parametrize("announced_by", ["scancel", "time limit"])
def test_announced_end_of_a_job_saves_and_queues_it_again(cluster, tmp_path, expected, announced_by):
    options = ["--requeue", "--open-mode=append"]
    pause = 0.5
    if announced_by == "time limit":
        options += ["--time=00:02", "--signal=USR1@80"]  # after 40 s
        pause = 5.0
    command = f"srun {JOB_COMMAND} {tmp_path / 'job'} --num-nodes=2 --pause={pause} --deadline=60 --requeue"
    script = write_script(tmp_path, command, options=options)
    job = cluster.submit(script)
    if announced_by == "scancel":
        checks.wait_for_step(tmp_path / "job", 3)
        cluster.run("scancel", "--signal=USR1", job)
    fields = cluster.wait_for_state(job, "COMPLETED", "FAILED", "TIMEOUT", timeout=170)
    printed = output(script, job)
    assert fields["JobState"] == "COMPLETED", printed
    assert int(fields["Restarts"]) == 1 or announced_by == "time limit"  # which each attempt may reach
    assert int(fields["Restarts"]) >= 1
    assert "the job is queued again, and resumes from its checkpoint" in printed
    assert "resume='auto': training resumes from" in printed
    assert 0 < checks.read_identities(tmp_path / "job", attempt=1)[0]["begin"] < 12
    checks.check_losses(tmp_path / "job", expected)
    checks.check_samples(tmp_path / "job")
    checks.check_no_survivors(tmp_path / "job")


def test_job_of_a_node_that_goes_down_continues_from_its_newest_checkpoint(cluster, tmp_path, expected):
    command = f"srun {JOB_COMMAND} {tmp_path / 'job'} --num-nodes=2 --pause=0.5"
    script = write_script(tmp_path, command, options=("--requeue", "--open-mode=append"))
    job = cluster.submit(script)
    checks.wait_for_step(tmp_path / "job", 5)
    cluster.run("scontrol", "update", "NodeName=n2", "State=DOWN", "Reason=test")
    checks.check_no_survivors(tmp_path / "job", seconds=30)
    cluster.run("scontrol", "update", "NodeName=n2", "State=RESUME", check=False)  # it may be back by itself
    cluster.wait_for_state(job, "COMPLETED")
    assert checks.read_identities(tmp_path / "job", attempt=1)[0]["begin"] >= 4
    checks.check_losses(tmp_path / "job", expected)
    checks.check_samples(tmp_path / "job")


def test_dstrat_submit_trains_in_a_job(cluster, tmp_path, expected):
    folder = tmp_path / "job"
    request = ("--scheduler=slurm", "--devices=2", "--option=time=00:05:00", "--name=small")
    command = (PYTHON, "-m", "dstrat", "submit", *request, str(JOB), str(folder), "--devices=2")
    submitted = cluster.call(*command, cwd=tmp_path)
    assert submitted.returncode == 0, submitted.stderr
    job = re.search(r"submitted slurm://\w+/(\d+)", submitted.stderr).group(1)
    fields = cluster.wait_for_state(job, "COMPLETED", "FAILED")
    printed = (tmp_path / f"slurm-{job}-small-0.out").read_text() + (tmp_path / f"slurm-{job}-small-0.err").read_text()
    assert fields["JobState"] == "COMPLETED", printed
    assert (fields["JobName"], fields["TimeLimit"]) == ("small-0", "00:05:00")
    assert "[0]:trained 12 steps" in printed
    assert checks.ranks(folder) == [(0, 0, 0), (1, 1, 0)]
    checks.check_losses(folder, expected)
    checks.check_no_survivors(folder)


# The scripts of the guide


@pytest.mark.parametrize(("name", "num_ranks"), [("train.sbatch", 4), ("one-node.sbatch", 2), ("requeue.sbatch", 2)])
def test_script_of_the_guide_trains(cluster, tmp_path, name, num_ranks):
    files = {block.title: block.text for block in blocks("clusters.md") if block.title}
    (tmp_path / "train.py").write_text(files["train.py"])
    script = tmp_path / name
    assert " python train.py" in files[name] or "\npython train.py" in files[name]
    script.write_text(files[name].replace("python train.py", f"{shlex.quote(PYTHON)} train.py"))
    job = cluster.submit(script)
    cluster.wait_for_state(job, "COMPLETED", "FAILED")
    printed = output(script, job)
    steps = 16 // num_ranks * (100 if name == "requeue.sbatch" else 1)
    assert f"trained {steps} steps\n" in printed, printed
