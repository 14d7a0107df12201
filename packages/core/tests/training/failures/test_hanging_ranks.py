"""Ranks that hang, or leave without a word, in the middle of a run: the job ends, and names them."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from packages.core.tests.training.conftest import ACCELERATOR, Averaging, Line, numbers
from tests.warm_program import WarmProgram
from torch.distributed import TCPStore
from torch.utils.data import DataLoader

from dstrat import Callback, Trainer
from dstrat.errors import MisuseError, RankFailedError
from dstrat.launch.nccl_status import describe_collectives
from dstrat.launch.rank import stack_file, this_rank


class Misbehaves(Callback):
    """Does something in one hook of one rank.

    Args:
        hook: Its name.
        rank: The rank; None is all of them.
        deed: What it does.
    """

    def __init__(self, hook: str, rank: int, deed) -> None:
        self.rank, self.deed = rank, deed
        setattr(self, hook, self.act)

    def act(self, trainer, *_):
        if self.rank in (trainer.global_rank, None):
            self.deed()


def fall_asleep():
    time.sleep(600)


@pytest.fixture
def fit(tmp_path):
    def fit(callbacks, seconds=60.0, hang_seconds=None):
        """With ``hang_seconds`` no checkpoint is saved: a busy disk may take longer, and waiting for it is idleness."""
        strategy = Averaging(timeout=timedelta(seconds=seconds))
        if hang_seconds is not None:
            strategy.hang_timeout = timedelta(seconds=hang_seconds)
        trainer = Trainer(
            accelerator=ACCELERATOR, devices=2, max_epochs=2, strategy=strategy,
            default_root_dir=tmp_path, logger=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks,
            enable_checkpointing=hang_seconds is None,
        )  # fmt: skip
        trainer.fit(Line(), DataLoader(numbers(), batch_size=4))

    return fit


@pytest.mark.parametrize(
    ("hook", "rank"),
    [
        ("on_train_batch_start", 0),
        ("on_train_batch_start", 1),
        ("setup", 0),
        pytest.param("setup", 1, marks=pytest.mark.variant),
        pytest.param("on_save_checkpoint", 0, marks=pytest.mark.variant),
        ("on_save_checkpoint", 1),
    ],
)
def test_rank_that_hangs_is_named_after_the_timeout(fit, hook, rank):
    with pytest.raises(RankFailedError, match=f"rank {rank} of 2 hung: (rank {1 - rank} timed out|nothing)") as caught:
        fit(Misbehaves(hook, rank, fall_asleep), seconds=5.0)
    assert "in fall_asleep" in caught.value.rank_traceback


def fit_again():
    trainer = Trainer(accelerator=ACCELERATOR, devices=2, max_epochs=1, strategy=Averaging(), logger=False)
    trainer.fit(Line(), DataLoader(numbers(), batch_size=4))


@pytest.mark.parametrize("hook", ["setup", "on_train_batch_start"])
def test_fit_within_a_rank_is_refused_at_once(fit, hook):
    """Its process group would wait for the other rank, which is in a step of the outer run."""
    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed: dstrat\.errors\.MisuseError: a run of") as caught:
        fit(Misbehaves(hook, 1, fit_again))
    assert "within another one: this process is rank 1 of 2 in a run that has not ended" in str(caught.value)
    assert "in fit_again" in caught.value.rank_traceback


def test_run_goes_on_where_the_program_catches_the_refusal_of_another_one(fit):
    def fit_in_vain():
        with pytest.raises(MisuseError, match="Call it before or after that run"):
            fit_again()

    fit(Misbehaves("on_train_batch_start", 1, fit_in_vain))


def test_ranks_that_all_hang_are_found(fit):
    with pytest.raises(RankFailedError, match="ranks 0, 1 of 2 hung: no progress for 2 s") as caught:
        fit(Misbehaves("on_train_batch_start", None, fall_asleep), seconds=2.0)
    for rank in range(2):
        assert f"Stack of rank {rank}:\n\nCurrent thread" in str(caught.value)
    assert "in pytest_runtest_call" not in str(caught.value)  # of the process that the ranks were forked from


def compute(seconds):
    """Use a processor for so many seconds, as slow hooks do and ranks that wait for a GPU."""
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def test_rank_that_waits_for_the_work_of_another_without_a_collective_is_no_hang(fit, tmp_path):
    flag = tmp_path / "data is there"

    def wait_for_flag():
        while not flag.exists():
            time.sleep(0.1)

    def prepare_data():
        compute(2)
        flag.touch()

    fit([Misbehaves("setup", 0, prepare_data), Misbehaves("setup", 1, wait_for_flag)], hang_seconds=0.5)


def spin_in_a_kernel():
    """Use a processor outside of torch's folders, as the host does while it waits for a GPU."""
    note = this_rank().folder / f"collectives-{os.getpid()}.txt"
    note.write_text(describe_collectives({"0": (5, 4)}))
    while True:
        os.utime(note)


def test_rank_with_a_pending_collective_waits_wherever_its_host_is(fit):
    hook = "on_train_batch_start"
    deeds = [Misbehaves(hook, 0, spin_in_a_kernel), Misbehaves(hook, 1, fall_asleep)]
    with pytest.raises(RankFailedError, match="rank 1 of 2 hung: no progress for 1 s, and rank 0 waited") as caught:
        fit(deeds, hang_seconds=1.0)
    assert "NCCL: pending: collective 5 of group 0" in str(caught.value)


def test_rank_that_works_for_long_is_no_hang(fit):
    fit(Misbehaves("on_train_epoch_end", 0, lambda: compute(2)), hang_seconds=0.5)


@pytest.mark.slow
def test_rank_at_work_that_is_looked_at_in_a_collective_is_no_hang(fit):
    # The file says that the function is one of torch.distributed.
    file = Path(torch.distributed.__file__).with_name("wait.py")
    code = "def wait_until(is_true):\n    while not is_true(): sum(range(100_000))"
    exec(compile(code, file, "exec"), globals())

    def work():
        stacks = stack_file(this_rank().folder, os.getpid())
        wait_until(lambda: stacks.stat().st_size)  # noqa: F821 - made above
        compute(3)

    fit(Misbehaves("on_train_epoch_end", 0, work), hang_seconds=0.5)


RERUN = """
import os, sys, time, warnings
sys.path.insert(0, {folder!r})
from conftest import ACCELERATOR, Averaging, Line, numbers
from datetime import timedelta
from torch.utils.data import DataLoader
from dstrat import Trainer

def wait_for_requests():
    time.sleep(600)

if os.environ.get("RANK") in {waiting}:
    wait_for_requests()
strategy = Averaging(start_method="popen")
strategy.hang_timeout = timedelta(seconds=4)
trainer = Trainer(
    accelerator=ACCELERATOR, devices=2, strategy=strategy, logger=False, max_epochs=1, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(Line(), DataLoader(numbers(), batch_size=4))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waiting", "who"),
    [
        (("1",), "rank 1 of 2 hung: no progress for 4 s, and rank 0 waited."),
        pytest.param(("0", "1"), "ranks 0, 1 of 2 hung: no progress for 4 s.", marks=pytest.mark.variant),
    ],
)
def test_rank_that_runs_the_script_and_does_not_come_to_the_launch_ends_the_job(tmp_path, waiting, who):
    script = tmp_path / "serve.py"
    folder = str(Path(__file__).parents[1])
    script.write_text(RERUN.format(folder=folder, waiting=waiting))
    program = WarmProgram(script)
    _, errors = program.communicate(timeout=400)
    assert program.returncode == 1
    assert who in errors
    assert "has to come to the same call of fit, which this one has not" in errors
    assert "choose start_method='spawn' or 'forkserver' there" in errors
    assert "in wait_for_requests" in errors


def test_limits_follow_the_timeout_that_is_given():
    assert Averaging().hang_timeout == timedelta(minutes=10)
    assert Averaging().timeout == timedelta(minutes=30)
    assert Averaging(timeout=timedelta(hours=2)).hang_timeout == timedelta(hours=2)
    assert Averaging(timeout=timedelta(minutes=30)).hang_timeout == timedelta(minutes=30)


SCRIPT = """
import os, sys
os.environ |= {{
    "TORCHELASTIC_RUN_ID": "0", "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": sys.argv[2],
    "RANK": sys.argv[1], "LOCAL_RANK": sys.argv[1], "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
}}
import signal, time, torch
sys.path.insert(0, {folder!r})
from conftest import ACCELERATOR, Averaging, Line, numbers
from datetime import timedelta
from torch.utils.data import DataLoader
from dstrat import Callback, Trainer

def compute(seconds):
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass

class Misbehaves(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if batch_idx == 1 and trainer.global_rank in {ranks}:
            {deed}

strategy = Averaging(timeout=timedelta(seconds=600))  # longer than the test may take
strategy.hang_timeout = timedelta(seconds=2)
trainer = Trainer(
    accelerator=ACCELERATOR, devices=2, strategy=strategy, logger=False, max_epochs=1, callbacks=Misbehaves(),
    enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
)
trainer.fit(Line(), DataLoader(numbers(), batch_size=4))
"""


@pytest.fixture
def start_ranks(tmp_path):
    """Start two ranks as another launcher does, which no supervisor watches."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun has one
    ranks = []

    def start_ranks(deed, misbehaving=(1,)):
        script = tmp_path / "train.py"
        folder = str(Path(__file__).parents[1])
        script.write_text(SCRIPT.format(folder=folder, deed=deed, ranks=misbehaving))
        ranks[:] = [WarmProgram(script, str(rank), str(store.port)) for rank in range(2)]
        return ranks

    yield start_ranks
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()


def test_rank_that_another_launcher_started_finds_its_own_hang(start_ranks):
    ranks = start_ranks("time.sleep(600)")
    _, (_, errors) = [rank.communicate(timeout=400) for rank in ranks]
    assert "rank 1 of 2 hung: no progress for 2 s, and rank 0 waited. If this is normal, pass" in errors
    assert re.search(r"Stack of rank 1:\n\nCurrent thread .*\n.*train.py.* in on_train_batch_start", errors)
    assert "Stack of rank 0:\n\nCurrent thread" in errors
    assert [rank.returncode for rank in ranks] == [1, 1]


def test_rank_that_does_not_respond_is_named_by_one_that_waits(start_ranks):
    waiting, _ = start_ranks("time.sleep(1); os.kill(os.getpid(), signal.SIGSTOP)")
    _, errors = waiting.communicate(timeout=400)
    assert "rank 1 of 2 hung: no progress for 2 s, and rank 0 waited" in errors
    assert waiting.returncode == 1


def test_ranks_of_another_launcher_that_all_hang_are_found(start_ranks):
    ranks = start_ranks("time.sleep(600)", (0, 1))
    errors = "".join(rank.communicate(timeout=400)[1] for rank in ranks)
    assert "ranks 0, 1 of 2 hung: no progress for 2 s. If" in errors
    assert [rank.returncode for rank in ranks] == [1, 1]


def test_rank_of_another_launcher_that_waits_for_work_is_no_hang(start_ranks):
    assert [rank.run(timeout=400) for rank in start_ranks("compute(6)")] == ["", ""]


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("leave", [sys.exit, lambda: sys.exit(0), lambda: os._exit(0)])
def test_rank_that_leaves_without_an_error_is_named(fit, leave, rank):
    with pytest.raises(RankFailedError, match=f"rank {rank} of 2 exited with code 0 before the others had ended"):
        fit(Misbehaves("on_train_batch_end", rank, leave))
