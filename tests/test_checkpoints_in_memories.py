"""Jobs on several machines whose ranks and machines are lost: they resume from the memory of the others.

Each machine is a folder, which stands for its memory, and processes that are started as torchrun starts them.
"""

import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.on_machines import NUM_SAMPLES
from tests.test_recovery import count_samples, lost_batches
from tests.warm_program import WarmProgram

PROGRAM = Path(__file__).with_name("on_machines.py")


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


class Machines:
    """A job on machines, which is started again after each fault.

    Args:
        folder: Where the job runs; ``memory-0`` and so on are the memories of the machines.
        strategy: The name of its class.
        ranks: The number of ranks of each machine.
        num_epochs: How long it trains.
    """

    def __init__(self, folder, strategy, ranks=(1, 1, 1), num_epochs=1):
        self.folder, self.strategy, self.ranks, self.num_epochs = folder, strategy, ranks, num_epochs
        self.attempt = -1
        self.processes = []
        self.script = folder / PROGRAM.name
        shutil.copy(PROGRAM, self.script)

    def start(self):
        self.attempt += 1
        arguments = [self.strategy, ",".join(map(str, self.ranks)), str(free_port())]
        self.processes = [
            WarmProgram(self.script, *arguments, str(rank), str(self.attempt), str(self.num_epochs))
            for rank in range(sum(self.ranks))
        ]

    def wait_for_training(self, rank=0):
        """Return whether training has begun, and not ended, in this attempt."""
        begun = self.folder / f"start-{self.attempt}-{rank}"
        deadline = time.monotonic() + 300
        while not begun.exists():
            if time.monotonic() > deadline or any(process.poll() is not None for process in self.processes):
                return False
            time.sleep(0.01)
        return True

    def kill(self, *ranks):
        """Kill some ranks at once, then, as torchrun does, the others; return what the first of them printed."""
        for rank in ranks:
            with suppress(ProcessLookupError):
                os.kill(self.processes[rank].pid, signal.SIGKILL)
        self.end()

    def lose(self, machine):
        """Lose a machine with its memory."""
        first = sum(self.ranks[:machine])
        self.kill(*range(first, first + self.ranks[machine]))
        shutil.rmtree(self.memory(machine))

    def end(self):
        for process in self.processes:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        self.processes = []

    def finish(self):
        """Wait for the end of the job, and return what each rank printed on stderr."""
        ends = [process.communicate(200) for process in self.processes]
        codes = [process.returncode for process in self.processes]
        self.processes = []
        assert codes == [0] * sum(self.ranks), "\n".join(err for _, err in ends)
        return [err for _, err in ends]

    def memory(self, machine):
        return self.folder / f"memory-{machine}"

    def checkpoints(self, machine):
        """Return the names of the checkpoints in the memory of a machine."""
        return sorted(path.name for path in self.saved(machine, "*.ckpt"))

    def unfinished(self):
        """Return how many machines have a checkpoint that is being written."""
        return sum(bool(self.saved(machine, ".dstrat-*.tmp")) for machine in range(len(self.ranks)))

    def saved(self, machine, pattern):
        folder = self.memory(machine) / f"dstrat-{os.geteuid()}" / str(self.folder).lstrip("/") / "checkpoints"
        with suppress(FileNotFoundError):  # the job removes one meanwhile
            return list(folder.glob(f"*/{pattern}"))
        return []

    def wait_for_copies(self):
        """Wait until each machine has files of its ranks and of another machine's; until then it may not be lost."""
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and all(process.poll() is None for process in self.processes):
            saved = [self.saved(machine, "*.ckpt") for machine in range(len(self.ranks))]
            with suppress(FileNotFoundError):
                names = [{path.name for path in paths if len(list(path.glob("*.safetensors"))) > 1} for paths in saved]
                if set.intersection(*names):
                    return
            time.sleep(0.005)

    def wait_for_checkpoint(self, name, machine=0):
        deadline = time.monotonic() + 300
        while name not in self.checkpoints(machine):
            assert time.monotonic() < deadline, f"there is no {name}"
            time.sleep(0.002)

    def assert_nothing_was_lost(self, weights):
        """Compare with a run without faults."""
        expected = {(epoch, index) for epoch in range(self.num_epochs) for index in range(NUM_SAMPLES)}
        assert count_samples(self.folder) == dict.fromkeys(expected, 1)
        # Those since a save, or since the one before that was being written.
        assert max(lost_batches(self.folder), default=0) < 10
        trained = torch.load(self.folder / "weights.pt")
        assert all(torch.equal(trained[name], value) for name, value in weights.items())
        assert [self.checkpoints(machine) for machine in range(len(self.ranks))] == [[] for _ in self.ranks]


@pytest.fixture
def machines(tmp_path):
    """Make jobs, and end them after the test whatever happens."""
    made = []

    def make(*arguments, **options):
        made.append(Machines(tmp_path, *arguments, **options))
        return made[-1]

    yield make
    for job in made:
        job.end()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Return the weights of a run without faults."""
    weights = {}

    def run(strategy, ranks=(1, 1, 1), num_epochs=1):
        key = strategy, ranks, num_epochs
        if key not in weights:
            job = Machines(tmp_path_factory.mktemp("undisturbed"), *key)
            job.start()
            job.finish()
            weights[key] = torch.load(job.folder / "weights.pt")
        return weights[key]

    return run


@pytest.mark.parametrize("strategy", ["FSDPStrategy", pytest.param("DDPStrategy", marks=pytest.mark.variant)])
def test_a_lost_machine_costs_the_steps_since_the_checkpoint_in_memory(machines, undisturbed, strategy):
    job = machines(strategy)
    job.start()
    job.wait_for_checkpoint("step=10.ckpt")
    job.lose(1)
    job.start()
    messages = job.finish()
    assert "resume='auto': training resumes from" in messages[0]
    assert "memory-0" in messages[0]
    job.assert_nothing_was_lost(undisturbed(strategy))


def test_a_loss_of_neighbors_falls_back_to_the_disk(machines, undisturbed):
    job = machines("DDPStrategy")
    job.start()
    job.wait_for_checkpoint("step=10.ckpt")
    job.lose(2)
    shutil.rmtree(job.memory(1))
    job.start()
    messages = job.finish()
    assert "resume='auto': training starts anew" in messages[0]
    # The training of the first attempt is not part of the result.
    for path in job.folder.glob("*-0-*"):
        path.unlink()
    job.assert_nothing_was_lost(undisturbed("DDPStrategy"))


@pytest.mark.parametrize("ranks", [(1, 1), pytest.param((1, 1, 1, 1), marks=pytest.mark.variant)])
def test_another_number_of_machines_continues(machines, ranks):
    job = machines("FSDPStrategy")
    job.start()
    job.wait_for_checkpoint("step=10.ckpt")
    job.lose(2)
    job.ranks = ranks
    job.start()
    messages = job.finish()
    assert f"was saved by 3 processes and is continued by {len(ranks)}" in messages[0]
    assert count_samples(job.folder) == dict.fromkeys(((0, index) for index in range(NUM_SAMPLES)), 1)
    assert [job.checkpoints(machine) for machine in range(len(ranks))] == [[] for _ in ranks]


def break_at_random(job, num_faults, seed):
    """Break a job at random times of its training, start it once more, and return how often each fault was made."""
    chance, faults = random.Random(seed), Counter()
    size = sum(job.ranks)
    while faults.total() < num_faults:
        job.start()
        if not job.wait_for_training(chance.randrange(size)):
            return faults
        time.sleep(chance.uniform(0, 0.6))
        kind = chance.choice(("rank", "ranks", "machine", "copy"))
        if kind == "copy":
            deadline = time.monotonic() + 300
            while not job.unfinished() and time.monotonic() < deadline:
                time.sleep(0.0005)
        if kind == "machine":
            job.wait_for_copies()
        if any(process.poll() is not None for process in job.processes):
            return faults  # it has trained to its end
        if kind == "machine":
            job.lose(chance.randrange(len(job.ranks)))
        else:
            job.kill(*chance.sample(range(size), 2 if kind == "ranks" else 1))
        faults[kind] += 1
    job.start()
    return faults


@pytest.mark.parametrize(
    ("strategy", "ranks", "num_faults", "num_epochs"),
    [
        ("FSDPStrategy", (1, 1), 4, 3),
        *(
            pytest.param(
                strategy, (1, 1, 1), 50, 40, marks=[pytest.mark.variant, pytest.mark.slow, pytest.mark.timeout(1800)]
            )
            for strategy in ("DDPStrategy", "FSDPStrategy")
        ),
    ],
)
def test_faults_of_ranks_and_machines_lose_no_sample(machines, undisturbed, strategy, ranks, num_faults, num_epochs):
    job = machines(strategy, ranks, num_epochs)
    faults = break_at_random(job, num_faults, seed=len(strategy))
    print(dict(faults))
    job.finish()
    assert faults.total() == num_faults
    job.assert_nothing_was_lost(undisturbed(strategy, ranks, num_epochs))


TORCHRUN = """
import os, runpy, sys
machine, port, script = sys.argv[1:]
os.makedirs(f"memory-{machine}", exist_ok=True)
os.environ |= {"DSTRAT_MEMORY_DIR": os.path.abspath(f"memory-{machine}"), "PYTHONPATH": REPOSITORY}
sys.argv = ["torchrun", "--nnodes=2", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}",
            "--rdzv-id=one-job", "--max-restarts=2", "--monitor-interval=0.2", script]
runpy.run_module("torch.distributed.run", run_name="__main__")
"""
TRAINING = """
import os
from tests.on_machines import train
train("FSDPStrategy", [1, 1], int(os.environ["TORCHELASTIC_RESTART_COUNT"]), 1)
"""


@pytest.mark.variant
def test_torchrun_on_two_machines_restarts_from_their_memory(machines, undisturbed):
    job = machines("FSDPStrategy", (1, 1))
    (script := job.folder / "training.py").write_text(TRAINING)
    (agent := job.folder / "agent.py").write_text(f"REPOSITORY = {str(PROGRAM.parents[1])!r}\n{TORCHRUN}")
    port = str(free_port())
    job.attempt, job.processes = 0, [WarmProgram(agent, str(machine), port, str(script)) for machine in (0, 1)]
    job.wait_for_checkpoint("step=10.ckpt")
    os.kill(int((job.folder / "pid-0-1").read_text()), signal.SIGKILL)
    job.finish()
    assert int((job.folder / "start-1-0").read_text()) >= 10
    job.assert_nothing_was_lost(undisturbed("FSDPStrategy", (1, 1)))
