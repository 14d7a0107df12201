"""Jobs with ``max_restarts`` whose ranks are killed or raise: no sample is lost or repeated."""

import itertools
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
import torch
from tests.recovering import NUM_SAMPLES
from tests.warm_program import WarmProgram

PROGRAM = Path(__file__).with_name("recovering.py")


@pytest.fixture
def start(tmp_path):
    """Start the program, and end it after the test whatever happens."""
    started = []

    def start(strategy, method, case, num_epochs=1):
        script = tmp_path / PROGRAM.name
        shutil.copy(PROGRAM, script)
        started.append(WarmProgram(script, strategy, method, case, str(num_epochs)))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()


def kill_ranks(process, folder, count, seed):
    """Kill a rank at a random time of each attempt, most in training and some before; return how many were killed."""
    chance = random.Random(seed)
    for attempt in range(count):
        rank = chance.randrange(2)
        awaited = folder / f"{'pid' if chance.random() < 0.15 else 'start'}-{attempt}-{rank}"
        deadline = time.monotonic() + 300
        while not awaited.exists():
            if process.poll() is not None or time.monotonic() > deadline:
                return attempt
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.5))
        os.kill(int((folder / f"pid-{attempt}-{rank}").read_text()), signal.SIGKILL)
    return count


def count_samples(folder):
    """Return how often each sample of each epoch has been trained on in the steps that the final state consists of."""
    attempts = sorted({int(path.name.split("-")[1]) for path in folder.glob("start-*-0")})
    starts = [int((folder / f"start-{attempt}-0").read_text()) for attempt in attempts]
    counts = Counter()
    for attempt, begin, end in zip(attempts, starts, [*starts[1:], float("inf")], strict=True):
        for path in folder.glob(f"batches-{attempt}-*"):
            for line in path.read_text().splitlines():
                batch, epoch, *indices = map(int, line.split())
                if begin < batch <= end:
                    counts.update((epoch, index) for index in indices)
    return counts


def lost_batches(folder):
    """Return how many batches of each attempt the next one has trained on again."""
    lost, attempts = [], sorted({int(path.name.split("-")[1]) for path in folder.glob("start-*-0")})
    for attempt, following in itertools.pairwise(attempts):
        lines = [line for path in folder.glob(f"batches-{attempt}-*") for line in path.read_text().splitlines()]
        begin = int((folder / f"start-{following}-0").read_text())
        lost.append(max([int(line.split()[0]) for line in lines], default=begin) - begin)
    return lost


def memory_of(folder):
    """Return the folder of checkpoints in memory of the runs in a folder."""
    return Path(f"/dev/shm/dstrat-{os.geteuid()}", str(folder).lstrip("/"))


def logged_steps(folder):
    (table,) = folder.glob("dstrat_logs/version_*/metrics.csv")
    return [int(line.split(",")[0]) for line in table.read_text().splitlines()[1:]]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the weights of runs that nobody has killed, by strategy."""
    weights = {}

    def run(strategy, num_epochs):
        if (strategy, num_epochs) not in weights:
            folder = tmp_path_factory.mktemp("undisturbed")
            script = folder / PROGRAM.name
            shutil.copy(PROGRAM, script)
            WarmProgram(script, strategy, "fork", "killed", str(num_epochs)).run()
            weights[strategy, num_epochs] = torch.load(folder / "weights.pt")
        return weights[strategy, num_epochs]

    return run


@pytest.mark.parametrize(
    ("strategy", "method", "kills", "num_epochs"),
    [
        ("DDPStrategy", "fork", 3, 1),
        pytest.param("DDPStrategy", "forkserver", 3, 1, marks=pytest.mark.variant),
        pytest.param("FSDPStrategy", "fork", 3, 1, marks=pytest.mark.variant),
        *(
            pytest.param(strategy, method, 20, 8, marks=[pytest.mark.variant, pytest.mark.slow])
            for strategy in ("DDPStrategy", "FSDPStrategy")
            for method in ("fork", "popen")
        ),
    ],
)
def test_killed_ranks_lose_and_repeat_no_sample(start, undisturbed, tmp_path, strategy, method, kills, num_epochs):
    process = start(strategy, method, "killed", num_epochs)
    killed = kill_ranks(process, tmp_path, kills, seed=len(strategy + method))
    out, err = process.communicate(800)
    assert process.returncode == 0, err
    assert killed == kills
    assert f"{kills} restarts, {kills} failed attempts" in out
    counts = count_samples(tmp_path)
    assert counts == dict.fromkeys(((e, i) for e in range(num_epochs) for i in range(NUM_SAMPLES)), 1)
    assert logged_steps(tmp_path) == list(range(1, num_epochs * NUM_SAMPLES // 4 + 1))
    weights = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(weights[name], value) for name, value in undisturbed(strategy, num_epochs).items())
    assert len(re.findall("attempt .* of 21 begins in ", err)) == kills
    assert not list(tmp_path.glob("**/.dstrat-*.tmp"))
    assert len(list(tmp_path.glob("**/checkpoints/*.ckpt"))) == 1


@pytest.mark.parametrize(
    ("strategy", "kills", "num_epochs"),
    [
        ("FSDPStrategy", 3, 1),
        *(
            pytest.param(strategy, 20, 8, marks=[pytest.mark.variant, pytest.mark.slow])
            for strategy in ("DDPStrategy", "FSDPStrategy")
        ),
    ],
)
def test_a_killed_rank_costs_the_steps_since_the_checkpoint_in_memory(
    start, undisturbed, tmp_path, strategy, kills, num_epochs
):
    process = start(strategy, "fork", "killed, in memory", num_epochs)
    killed = kill_ranks(process, tmp_path, kills, seed=len(strategy))
    out, err = process.communicate(800)
    assert process.returncode == 0, err
    assert killed == kills
    assert f"{kills} restarts, {kills} failed attempts" in out
    assert count_samples(tmp_path) == dict.fromkeys(((e, i) for e in range(num_epochs) for i in range(NUM_SAMPLES)), 1)
    assert max(lost_batches(tmp_path)) < 10  # those since a save, or since the one before that was being written
    weights = torch.load(tmp_path / "weights.pt")
    assert all(torch.equal(weights[name], value) for name, value in undisturbed(strategy, num_epochs).items())
    assert len(list(tmp_path.glob("**/checkpoints/*.ckpt"))) == 1
    assert not list(memory_of(tmp_path).glob("**/*.ckpt"))


def test_same_error_after_the_same_step_ends_the_job(start, tmp_path):
    process = start("DDPStrategy", "fork", "raise")
    _, err = process.communicate()
    assert process.returncode == 1
    assert "rank 1 of 2 failed: ValueError: bad sample" in err
    assert re.search(r"after step 7; attempt 2 of 4 begins in 1 s from '.*step=5.ckpt' \(step 5\)\n", err)
    assert "Not restarted: attempt 1 has failed with the same error after the same step." in err
    assert re.search(r"\nattempt 1 of 4: rank 1 .*, after step 7\nattempt 2 of 4: rank 1 .*, after step 7\n", err)
    assert err.count('raise ValueError(f"bad sample {os.getpid()}")') == 2


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "popen"])
def test_error_that_passes_is_survived(start, tmp_path, method):
    process = start("DDPStrategy", method, "raise once")
    out, err = process.communicate()
    assert process.returncode == 0, err
    assert "1 restarts, 1 failed attempts" in out
    assert "rank 1 of 2 failed: ConnectionError: the store is not there, after step 7; attempt 2 of 4 begins" in err
    assert "attempt 2 of 4 has ended without a failure (attempt 1: rank 1 of 2 failed: ConnectionError" in err
    assert set(count_samples(tmp_path).values()) == {1}
    assert logged_steps(tmp_path) == list(range(1, NUM_SAMPLES // 4 + 1))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("raise at the start", "Not restarted: it has failed before its first batch was trained on, and would again."),
        ("exit", "Not restarted: the rank has exited by itself."),
        ("interrupt", "KeyboardInterrupt"),
    ],
)
def test_failure_that_would_come_again_is_not_retried(start, case, message):
    process = start("DDPStrategy", "fork", case)
    _, err = process.communicate()
    assert process.returncode != 0
    assert message in err
    assert "begins in" not in err
