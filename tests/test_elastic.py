"""Elastic fits whose ranks are killed: the others keep their processes, and train as a resumed fit on fewer ranks."""

import contextlib
import os
import random
import re
import shutil
import signal
import time
from collections import Counter
from fractions import Fraction
from itertools import chain, product
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.elastic_fit import NUM_EPOCHS, NUM_SAMPLES
from tests.warm_program import WarmProgram
from torch.nn.utils import parametrize
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler

from dstrat import Trainer, TrainModule
from dstrat.data.limits import limit_of
from dstrat.errors import RequestError
from dstrat.training.loops.global_batch import keep_global_batch, restore_settings
from dstrat.training.run_beginning import RunBeginning
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
    if method == "popen":  # the ranks of other methods do not send settings back
        assert "at least 1 steps" in out  # as a callback of the smaller group has set it
    assert "2 ranks at the end" in out
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
    beginning = RunBeginning(net)
    net.body.requires_grad_()
    net.head(net.body(torch.ones(1, 2))).backward()
    beginning.restore()
    assert [parameter.requires_grad for parameter in net.parameters()] == [False, False, True, True]
    assert [parameter.grad for parameter in net.parameters()] == [None] * 4


class Half(torch.nn.Module):
    def forward(self, weight):
        return weight / 2


class Twice(torch.nn.Module):
    """Is made of two tensors, as weight norm, so that the parameter itself goes."""

    def forward(self, first, second):
        return first + second

    def right_inverse(self, weight):
        return weight / 2, weight / 2


def halve_gradient(parameter):
    parameter.grad.div_(2)


class Prepared(TrainModule):
    """Changes parameters, modules and classes where the fit begins."""

    def __init__(self):
        super().__init__()
        self.halved, self.hooked, self.replaced = (torch.nn.Linear(2, 2) for _ in range(3))
        self.handle = self.hooked.bias.register_hook(lambda gradient: gradient / 4)

    def setup(self, stage):
        parametrize.register_parametrization(self.halved, "weight", Half())
        self.hooked.weight.register_hook(lambda gradient: gradient / 2)
        self.hooked.weight.register_post_accumulate_grad_hook(halve_gradient)
        self.replaced = torch.nn.Sequential(self.replaced, torch.nn.ReLU())

    def configure_model(self):
        if not hasattr(self, "head"):
            self.head = torch.nn.Linear(2, 1)
            self.head.register_parameter("scale", None)
            self.register_buffer("seen", torch.zeros(1))

    def begin(self):
        self.setup("fit")
        self.configure_model()

    def gradients(self):
        self.zero_grad()
        loss = self.head(self.replaced(self.hooked(self.halved(torch.ones(1, 2))).abs())).sum()
        loss.backward()
        return [self.hooked.weight.grad.clone(), self.hooked.bias.grad.clone(), self.halved.weight.detach().clone()]


def test_what_a_beginning_adds_to_modules_is_added_once_by_a_later_one():
    net = Prepared()
    names, parameters = [name for name, _ in net.named_modules()], list(net.parameters())
    beginning = RunBeginning(net)
    net.begin()
    head, once = net.head, net.gradients()
    beginning.restore()
    assert [name for name, _ in net.named_modules()] == names
    assert all(one is other for one, other in zip(net.parameters(), parameters, strict=True))
    assert type(net.halved) is torch.nn.Linear
    assert not list(net.buffers())
    net.begin()
    assert net.head is not head
    net.head.load_state_dict(head.state_dict())
    assert all(map(torch.equal, net.gradients(), once))
    net.handle.remove()
    assert torch.equal(net.gradients()[1], 4 * once[1])


def test_a_parameter_that_a_beginning_replaces_by_another_one_is_named():
    net = Prepared()
    beginning = RunBeginning(net)
    net.begin()
    assert not beginning.find_replaced_parameter()
    parametrize.register_parametrization(net.hooked, "weight", Twice())
    assert beginning.find_replaced_parameter() == "hooked.weight"
    net = Prepared()
    beginning = RunBeginning(net)
    net.halved.weight = torch.nn.Parameter(torch.zeros(3, 2))
    assert beginning.find_replaced_parameter() == "halved.weight"


@pytest.mark.parametrize("strategy", ["DDPStrategy", pytest.param("FSDPStrategy", marks=pytest.mark.variant)])
def test_all_ranks_are_restarted_where_a_parameter_has_been_replaced(start, tmp_path, strategy):
    process = start(strategy, "popen", 3, "parameter replaced")
    kill(process, tmp_path, 0, 1, 7)
    _out, err = process.communicate(120)
    assert process.returncode == 0, err
    assert "Net has replaced its parameter 'layers.2.weight' since the beginning of the fit" in err
    assert "attempt 2 of 6 begins in 1 s" in err
    assert not set(pids_of(tmp_path, 0).values()) & set(pids_of(tmp_path, 1).values())


class ElasticRun(SimpleNamespace):
    """Has what a run has in one of several ranks."""

    settings = property(attrgetter("trainer.settings"))


def make_run(ranks, *, started=3, **arguments):
    trainer = Trainer(strategy="ddp", accelerator="cpu", devices=started, max_restarts=1, elastic=True, **arguments)
    return ElasticRun(
        is_fitting=True, is_global_zero=False, module=TrainModule(), callbacks=[], scaled_settings={},
        plan=trainer.plan, world_size=ranks, trainer=trainer,
    )  # fmt: skip


def divided(loader, ranks, **arguments):
    """Return the loader and the settings of fewer ranks than were started; None where they cannot train alike."""
    run = make_run(ranks, **arguments)
    try:
        loader = keep_global_batch(run, loader)
    except RequestError:
        assert ranks not in run.sizes
        return None
    assert ranks in run.sizes
    return loader, run.settings


def test_settings_that_are_changed_in_a_fit_of_fewer_ranks_stay():
    run = make_run(2, limit_train_batches=4)
    trainer, loader = run.trainer, DataLoader(range(96), 4)
    keep_global_batch(run, loader)
    trainer.max_epochs, trainer.val_check_interval = 7, 4
    keep_global_batch(run, loader)  # as reload_dataloaders_every_n_epochs asks
    assert (trainer.max_epochs, trainer.accumulate_grad_batches, trainer.val_check_interval) == (7, 2, 8)
    trainer.limit_train_batches = 6
    restore_settings(run)
    assert (trainer.max_epochs, trainer.accumulate_grad_batches) == (7, 1)
    assert (trainer.limit_train_batches, trainer.val_check_interval) == (6, 4)


def steps_of(loader, settings, ranks):
    """Return the samples of each optimizer step of an epoch, and after which of its batches is a validation."""
    of_ranks = []
    for rank in range(ranks):
        sampler = DistributedSampler(loader.dataset, ranks, rank, shuffle=False)  # pads as dstrat does
        of_ranks.append([*BatchSampler(sampler, loader.batch_sampler.batch_size, loader.drop_last)])
    batches = [[*chain(*of_each)] for of_each in zip(*of_ranks, strict=True)]
    batches = batches[: limit_of(settings.data.limit_train_batches, len(batches), "")]
    of_step = settings.steps.accumulate_grad_batches
    interval = settings.evaluation.val_check_interval
    interval = limit_of(interval, len(batches), "") if interval != 1.0 else len(batches)
    steps = [sorted(chain(*batches[begin : begin + of_step])) for begin in range(0, len(batches), of_step)]
    return steps, Fraction(interval, of_step)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"accumulate_grad_batches": 2},
        {"limit_train_batches": 0.5},
        {"limit_train_batches": 3},
        {"val_check_interval": 0.5},
        {"val_check_interval": 0.5, "limit_train_batches": 4},
    ],
)
@pytest.mark.parametrize("drop_last", [True, False])
def test_an_epoch_of_fewer_ranks_has_the_same_steps(arguments, drop_last):
    num_divided = 0
    for samples, ranks in product(range(36, 100, 5), (1, 2)):
        loader = DataLoader(range(samples), 4, drop_last=drop_last)
        found = divided(loader, ranks, **arguments)
        if found is None:
            continue
        num_divided += 1
        steps, interval = steps_of(loader, Trainer(accelerator="cpu", devices=1, **arguments).settings, 3)
        of_fewer, interval_of_fewer = steps_of(*found, ranks)
        full = len(steps) if drop_last else len(steps) - 1  # the last one may have other samples twice
        assert len(of_fewer) == len(steps)
        assert of_fewer[:full] == steps[:full]
        assert interval_of_fewer == interval or arguments.get("val_check_interval") is None
    assert num_divided > 5


def test_loaders_that_drop_samples_go_on_only_where_all_have_the_same_batches():
    loader, other = (DataLoader(range(count), 4, drop_last=True) for count in (48, 56))
    assert divided([loader, loader], 2) is not None
    assert divided([loader, other], 2) is None


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
        ({"elastic": "yes", "max_restarts": 0}, "elastic='yes' must be True, False or 'replace'"),
        ({"max_restarts": -1}, "max_restarts=-1"),
        ({"preemption_deadline": "90", "max_restarts": 0}, "preemption_deadline='90' must be a number of seconds"),
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


@pytest.mark.parametrize("name", ["max_restarts", "elastic", "preemption_deadline"])
def test_arguments_that_the_launcher_is_made_for_cannot_be_set(name):
    trainer = make_run(3).trainer
    value = getattr(trainer, name)
    with pytest.raises(AttributeError):
        setattr(trainer, name, 3)
    assert getattr(trainer, name) == value == getattr(trainer.request, name)
