"""Elastic fits whose ranks are killed: the others keep their processes, and train as a resumed fit on fewer ranks."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.elastic_fit import NUM_EPOCHS, NUM_SAMPLES
from tests.warm_program import WarmProgram

from dstrat import Trainer, TrainModule
from dstrat.errors import RequestError
from dstrat.training.elastic import RunBeginning
from dstrat_ddp import DDPStrategy
from dstrat_fsdp import FSDPStrategy, ModelParallelStrategy

PROGRAM = Path(__file__).with_name("elastic_fit.py")
STEPS = NUM_EPOCHS * NUM_SAMPLES // 12


@pytest.fixture
def start(tmp_path):
    """Start the program in a folder, and end it after the test whatever happens."""
    started = []

    def start(*arguments, folder=tmp_path):
        script = folder / PROGRAM.name
        shutil.copy(PROGRAM, script)
        started.append(WarmProgram(script, *map(str, arguments)))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def wait_for(is_true, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not is_true():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.002)


def batches_of(folder, attempt, rank):
    """Return step, batch in the step, epoch, loss and samples of each batch of a rank."""
    path = folder / f"batches-{attempt}-{rank}"
    lines = path.read_text().splitlines() if path.exists() else []
    batches = []
    for line in lines:
        _when, step, in_group, epoch, loss, *samples = line.split()
        batches.append((int(step), int(in_group), int(epoch), loss, *map(int, samples)))
    return batches


def pids_of(folder, attempt):
    return {int(path.name.split("-")[2]): int(path.read_text()) for path in folder.glob(f"pid-{attempt}-[0-9]")}


def kill(process, folder, attempt, rank, step):
    """Kill a rank of an attempt after a step, and return its process id and the time."""
    wait_for(lambda: any(batch[0] >= step for batch in batches_of(folder, attempt, rank)), process)
    pid = pids_of(folder, attempt)[rank]
    os.kill(pid, signal.SIGKILL)
    return pid, time.time()


def print_pause(folder, attempt, moment):
    """Print the time from a kill to the first optimizer step of the next attempt."""
    lines = [line.split() for path in folder.glob(f"batches-{attempt}-*") for line in path.read_text().splitlines()]
    pause = min(float(when) for when, _, in_group, *_ in lines if in_group == "0") - moment
    print(f"{1000 * pause:.0f} ms from the kill to the next step")
    assert pause < 20  # within which all are ready, or are restarted


def started_at(folder, attempt):
    return int((folder / f"start-{attempt}-0").read_text())


def groups_in(folder):
    """Return the numbers of the groups that have begun to train."""
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("start-*-0"))


def count_samples(folder, attempts):
    """Return how often each sample of each epoch has been trained on in the steps that the final state consists of."""
    starts = [started_at(folder, attempt) for attempt in attempts]
    counts = Counter()
    for attempt, begin, end in zip(attempts, starts, [*starts[1:], float("inf")], strict=True):
        for path in folder.glob(f"batches-{attempt}-*"):
            for step, _, epoch, _, *samples in batches_of(folder, attempt, path.name.split("-")[2]):
                if begin < step <= end:
                    counts.update((epoch, sample) for sample in samples)
    return counts


ONCE = dict.fromkeys(((epoch, sample) for epoch in range(NUM_EPOCHS) for sample in range(NUM_SAMPLES)), 1)


def assert_equal_to_resumed(start, folder, attempt, strategy, *, ranks, batch_size, accumulate):
    """Compare an attempt with a fit that another job resumes from the same checkpoint on as many ranks."""
    resumed = folder / f"resumed-{attempt}"
    resumed.mkdir()
    path = folder / f"resumed-{attempt}.ckpt"
    process = start(strategy, "fork", ranks, "resumed", path, batch_size, accumulate, folder=resumed)
    process.run()
    for rank in range(ranks):
        batches = batches_of(resumed, 0, rank)
        assert batches
        assert batches_of(folder, attempt, rank) == batches
    weights, expected = (torch.load(each / "weights.pt") for each in (folder, resumed))
    assert all(torch.equal(weights[name], value) for name, value in expected.items())


def logged_steps(folder):
    (table,) = folder.glob("dstrat_logs/version_*/metrics.csv")
    lines = [line.split(",") for line in table.read_text().splitlines()]
    column = lines[0].index("loss_step" if "loss_step" in lines[0] else "loss")
    return [int(line[0]) for line in lines[1:] if line[column]]


@pytest.mark.parametrize(
    ("strategy", "method", "case"),
    [
        ("DDPStrategy", "fork", "in memory"),
        pytest.param("FSDPStrategy", "fork", "in memory", marks=pytest.mark.variant),
        pytest.param("DDPStrategy", "popen", "on the disk", marks=pytest.mark.variant),
        ("FSDPStrategy", "fork", "on the disk"),
    ],
)
def test_survivors_of_a_killed_rank_train_as_a_resumed_fit(start, tmp_path, strategy, method, case):
    chance = random.Random()
    rank, step = chance.randrange(3), chance.randrange(12, 35)  # after the checkpoint of step 5 is complete
    print(f"rank {rank} is killed after step {step}")
    process = start(strategy, method, 3, case)
    killed, moment = kill(process, tmp_path, 0, rank, step)
    out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert "1 restarts, 1 failed attempts" in out, err
    assert "1 accumulated" in out  # the user's setting again, after the fit
    print_pause(tmp_path, 1, moment)
    before, after = pids_of(tmp_path, 0), pids_of(tmp_path, 1)
    assert list(after.values()) == [pid for _, pid in sorted(before.items()) if pid != killed]
    assert re.search(r"rank \d of 3 was killed by SIGKILL .*; the other 2 ranks go on as attempt 2 of 6 from '", err)
    assert count_samples(tmp_path, [0, 1]) == ONCE
    logged = logged_steps(tmp_path)
    assert len(logged) == len(set(logged))
    # Running means start anew on another number of ranks, also those of the step after which a checkpoint was saved.
    assert {*logged, started_at(tmp_path, 1)} == set(range(1, STEPS + 1))
    assert_equal_to_resumed(start, tmp_path, 1, strategy, ranks=2, batch_size=3, accumulate=2)


def test_a_later_beginning_has_no_gradients_and_trains_what_the_first_one_does():
    net = TrainModule()
    net.body, net.head = torch.nn.Linear(2, 2), torch.nn.Linear(2, 1)
    net.body.requires_grad_(requires_grad=False)
    beginning = RunBeginning(SimpleNamespace(module=net, datamodule=None, callbacks=[]))
    net.body.requires_grad_()
    net.head(net.body(torch.ones(1, 2))).backward()
    beginning.restore()
    assert [parameter.requires_grad for parameter in net.parameters()] == [False, False, True, True]
    assert [parameter.grad for parameter in net.parameters()] == [None] * 4


@pytest.mark.parametrize("strategy", ["DDPStrategy", pytest.param("FSDPStrategy", marks=pytest.mark.variant)])
def test_two_ranks_are_killed_one_after_the_other(start, tmp_path, strategy):
    process = start(strategy, "fork", 3, "in memory")
    first, _ = kill(process, tmp_path, 0, 0, 8)
    second, moment = kill(process, tmp_path, 1, 1, 18)
    out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert "2 restarts, 2 failed attempts" in out
    print_pause(tmp_path, 2, moment)
    (survivor,) = set(pids_of(tmp_path, 0).values()) - {first, second}
    assert pids_of(tmp_path, 2) == {0: survivor}
    assert count_samples(tmp_path, [0, 1, 2]) == ONCE
    assert_equal_to_resumed(start, tmp_path, 2, strategy, ranks=1, batch_size=4, accumulate=3)


@pytest.mark.parametrize("strategy", ["FSDPStrategy", pytest.param("DDPStrategy", marks=pytest.mark.variant)])
def test_rank_that_is_killed_while_checkpoints_are_copied_loses_no_sample(start, tmp_path, strategy):
    process = start(strategy, "fork", 3, "during the copy")
    _, moment = kill(process, tmp_path, 0, random.randrange(3), random.randrange(3, 35))
    out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert "1 restarts" in out
    print_pause(tmp_path, 1, moment)
    assert count_samples(tmp_path, [0, 1]) == ONCE
    assert not list(Path(f"/dev/shm/dstrat-{os.geteuid()}", str(tmp_path).lstrip("/")).glob("**/*.ckpt"))


@pytest.mark.parametrize(
    ("moment", "strategy"),
    [
        ("at once", "DDPStrategy"),
        ("in the preparation", "FSDPStrategy"),
        pytest.param("at once", "FSDPStrategy", marks=pytest.mark.variant),
        pytest.param("in the preparation", "DDPStrategy", marks=pytest.mark.variant),
    ],
)
def test_rank_that_is_killed_while_the_others_regroup_loses_no_sample(start, tmp_path, strategy, moment):
    process = start(strategy, "fork", 3, "in memory")
    kill(process, tmp_path, 0, 0, 8)
    if moment == "at once":
        time.sleep(random.uniform(0, 0.05))
    else:
        wait_for(lambda: 1 in pids_of(tmp_path, 1), process)
    os.kill(pids_of(tmp_path, 0)[1], signal.SIGKILL)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    attempts = [attempt for attempt in range(3) if (tmp_path / f"start-{attempt}-0").exists()]
    assert count_samples(tmp_path, attempts) == ONCE
    assert pids_of(tmp_path, attempts[-1])[0] == pids_of(tmp_path, 0)[2]


def test_all_ranks_are_restarted_before_there_is_a_checkpoint(start, tmp_path):
    process = start("DDPStrategy", "fork", 3, "no checkpoint yet")
    kill(process, tmp_path, 0, 1, 4)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert "attempt 2 of 6 begins in 1 s from the beginning" in err
    assert len(pids_of(tmp_path, 1)) == 3
    assert not set(pids_of(tmp_path, 0).values()) & set(pids_of(tmp_path, 1).values())
    assert count_samples(tmp_path, [1]) == ONCE


def test_all_ranks_are_restarted_after_an_exception(start, tmp_path):
    process = start("DDPStrategy", "fork", 3, "raises")
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert "rank 1 of 3 failed: ValueError: an error of the program, after step 12; attempt 2 of 6 begins in 1 s" in err
    assert len(pids_of(tmp_path, 1)) == 3
    assert count_samples(tmp_path, [0, 1]) == ONCE


def test_all_ranks_are_restarted_where_a_step_cannot_be_divided(start, tmp_path):
    process = start("DDPStrategy", "fork", 4, "on the disk")  # 16 samples in each step, and 3 ranks remain
    kill(process, tmp_path, 0, 1, 7)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert re.search(r"rank 1 of 4 was killed by SIGKILL .*; attempt 2 of 6 begins in 1 s from '", err)
    assert len(pids_of(tmp_path, 1)) == 4
    assert count_samples(tmp_path, [0, 1]) == ONCE


def test_all_ranks_with_shards_are_restarted_where_checkpoints_leave_out_weights(start, tmp_path):
    process = start("FSDPStrategy", "fork", 3, "weights left out")
    kill(process, tmp_path, 0, 1, 7)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert "the checkpoints of Net may leave out weights" in err
    assert "attempt 2 of 6 begins in 1 s" in err
    assert not set(pids_of(tmp_path, 0).values()) & set(pids_of(tmp_path, 1).values())


def test_all_ranks_are_restarted_from_a_checkpoint_of_fewer(start, tmp_path):
    process = start("DDPStrategy", "fork", 3, "raises later")
    kill(process, tmp_path, 0, 2, 12)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert [len(pids_of(tmp_path, attempt)) for attempt in range(3)] == [3, 2, 3]
    assert started_at(tmp_path, 2) == 25
    assert count_samples(tmp_path, [0, 1, 2]) == ONCE


@pytest.mark.parametrize(
    ("strategy", "method"),
    [
        ("DDPStrategy", "fork"),
        ("DDPStrategy", "popen"),
        *(pytest.param("DDPStrategy", method, marks=pytest.mark.variant) for method in ("spawn", "forkserver")),
        pytest.param("FSDPStrategy", "fork", marks=pytest.mark.variant),
    ],
)
def test_new_process_takes_the_place_of_a_killed_rank(start, tmp_path, strategy, method):
    chance = random.Random()
    rank, step = chance.randrange(3), chance.randrange(12, 30)  # after the checkpoint of step 5 is complete
    print(f"rank {rank} is killed after step {step}")
    process = start(strategy, method, 3, "replaced")
    killed, _ = kill(process, tmp_path, 0, rank, step)
    out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert "1 restarts, 1 failed attempts" in out, err
    assert re.search(r"a new process joined: 3 ranks go on from '.*step=\d+\.ckpt' \(step \d+\)\n", err)
    before, between, after = (pids_of(tmp_path, group) for group in range(3))
    survivors = [pid for _, pid in sorted(before.items()) if pid != killed]
    assert list(between.values()) == survivors
    assert [after[0], after[1]] == survivors
    assert after[2] not in before.values()
    # No step of the smaller group is done again.
    assert max(batch[0] for batch in batches_of(tmp_path, 1, 0)) == started_at(tmp_path, 2)
    assert count_samples(tmp_path, [0, 1, 2]) == ONCE
    logged = logged_steps(tmp_path)
    assert len(logged) == len(set(logged))
    assert_equal_to_resumed(start, tmp_path, 2, strategy, ranks=3, batch_size=4, accumulate=1)


@pytest.mark.parametrize("strategy", ["FSDPStrategy", pytest.param("DDPStrategy", marks=pytest.mark.variant)])
def test_new_process_joins_a_rank_that_trains_alone(start, tmp_path, strategy):
    process = start(strategy, "fork", 2, "replaced")
    kill(process, tmp_path, 0, 0, 12)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert [len(pids_of(tmp_path, group)) for group in range(3)] == [2, 1, 2], err
    assert pids_of(tmp_path, 2)[0] == pids_of(tmp_path, 0)[1]
    assert count_samples(tmp_path, [0, 1, 2]) == ONCE


@pytest.mark.parametrize("strategy", ["DDPStrategy", pytest.param("FSDPStrategy", marks=pytest.mark.variant)])
def test_ranks_that_are_killed_while_a_new_process_joins_lose_no_sample(start, tmp_path, strategy):
    process = start(strategy, "fork", 3, "replaced")
    kill(process, tmp_path, 0, 0, 12)
    wait_for(lambda: 0 in pids_of(tmp_path, 1), process)
    pause = random.uniform(0, 1.5)
    print(f"another rank is killed {pause:.3f} s after the smaller group has begun")
    time.sleep(pause)
    newest = max(group for group in range(3) if pids_of(tmp_path, group))
    last = max((batch[0] for group in range(3) for batch in batches_of(tmp_path, group, 0)), default=0)
    if last < STEPS - 3:  # otherwise the fit is nearly over
        with contextlib.suppress(ProcessLookupError):
            os.kill(random.choice([*pids_of(tmp_path, newest).values()]), signal.SIGKILL)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert count_samples(tmp_path, groups_in(tmp_path)) == ONCE


@pytest.mark.variant
def test_ranks_go_on_where_a_new_process_ends_when_they_wait_for_it(start, tmp_path):
    process = start("DDPStrategy", "popen", 3, "replaced too late")
    kill(process, tmp_path, 0, 1, 12)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert "the process that was to take the place" in err or "rank 2 of 3 was killed" in err
    assert count_samples(tmp_path, groups_in(tmp_path)) == ONCE


def test_ranks_go_on_where_a_new_process_fails_before_it_joins(start, tmp_path):
    process = start("DDPStrategy", "popen", 3, "replaced in vain")
    kill(process, tmp_path, 0, 1, 12)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert len(pids_of(tmp_path, 1)) == 2
    assert not pids_of(tmp_path, 2)
    assert count_samples(tmp_path, [0, 1]) == ONCE


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"elastic": 2}, "elastic=2 must be True, False or 'replace'"),
        ({"elastic": "replace"}, "passes the state to new processes in memory, and no callback saves there"),
        ({"max_restarts": 0}, "elastic=True goes on after at most max_restarts deaths of ranks, and max_restarts=0"),
        (
            {"enable_checkpointing": False},
            "goes on from the newest checkpoint, and no callback saves any",
        ),
        ({"strategy": FSDPStrategy(device_mesh=(3,))}, "FSDPStrategy has a number of ranks, by device_mesh"),
        ({"strategy": FSDPStrategy(sharding_strategy="HYBRID_SHARD")}, "has a number of ranks, by device_mesh, HYBRID"),
        ({"strategy": ModelParallelStrategy()}, "ModelParallelStrategy cannot be set up again in them for fewer ranks"),
        (
            {"strategy": DDPStrategy(ddp_comm_hook="allreduce", ddp_comm_state=object())},
            "keeps the first one",
        ),
        ({"strategy": DDPStrategy(process_group_backend="mpi")}, "as those of gloo, and the backend is 'mpi'"),
    ],
)
def test_what_cannot_go_on_is_refused_at_the_start(words, message):
    arguments = {"strategy": "ddp", "accelerator": "cpu", "devices": 3, "max_restarts": 2, "elastic": True, **words}
    with pytest.raises(RequestError, match=re.escape(message)):
        Trainer(**arguments)
