"""A function that one process of the job calls."""

from __future__ import annotations

import logging

import pytest
from tests.printed import without_gloo

from dstrat import rank_zero_only
from dstrat.launch import external
from dstrat.resolve.rank_zero import is_rank_zero
from dstrat.utilities import rank_zero_info, rank_zero_warn

TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
}
SLURM = {"SLURM_JOB_ID": "1", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_TASKS": "2"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({**TORCHRUN, "RANK": "0"}, True),
        ({**TORCHRUN, "RANK": "1"}, False),
        ({**SLURM, "SLURM_PROCID": "0"}, True),
        ({**SLURM, "SLURM_PROCID": "1"}, False),
        ({"RANK": "1"}, True),  # of no job
    ],
)
def test_outside_a_run_the_environment_says_which_rank_this_is(environ, expected):
    assert is_rank_zero(environ) is expected


def test_what_a_rank_does_again_on_its_way_to_its_launch_is_left_out(monkeypatch, tmp_path):
    of_supervisor, of_rank = external.LaunchHistory(), external.LaunchHistory()
    of_supervisor.begin_launch()
    assert of_supervisor.begin_launch() == 1
    of_supervisor.save(tmp_path)
    of_rank.load(tmp_path)
    monkeypatch.setattr(external, "history", of_rank)
    of_rank.begin_launch()
    assert not is_rank_zero({})
    of_rank.begin_launch()
    assert is_rank_zero({})


def test_the_function_keeps_its_name_and_result():
    @rank_zero_only
    def double(number, *, by=2):
        """Double."""
        return number * by

    assert (double(3, by=3), double.__name__, double.__doc__) == (9, "double", "Double.")


def test_in_a_run_one_rank_calls_it(quiet_trainer, line_class, loader, averaging, capfd):
    @rank_zero_only
    def say(word):
        print(word, flush=True)

    class Saying(line_class):
        def on_train_start(self):
            say(f"rank {self.global_rank}")

    quiet_trainer(strategy=averaging(), devices=2, max_epochs=1).fit(Saying(), loader())
    say("after")
    assert without_gloo(capfd.readouterr().out) == "rank 0\nafter\n"


def set_rank(monkeypatch, rank):
    for name, value in {**TORCHRUN, "RANK": str(rank)}.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("rank", [0, 1])
def test_one_process_of_the_job_logs_and_warns(monkeypatch, caplog, recwarn, rank):
    set_rank(monkeypatch, rank)
    with caplog.at_level(logging.INFO):
        rank_zero_info("read %d files", 3)
    rank_zero_warn("too few", category=FutureWarning)
    assert caplog.messages == (["read 3 files"] if rank == 0 else [])
    assert [(type(w.message), str(w.message), w.filename) for w in recwarn] == (
        [(FutureWarning, "too few", __file__)] if rank == 0 else []
    )


def test_a_message_is_on_stderr_where_logging_is_not_set_up(monkeypatch, capsys):
    set_rank(monkeypatch, 0)
    monkeypatch.setattr(logging.getLogger("dstrat.resolve.rank_zero"), "propagate", False)
    rank_zero_info("read %d files", 3)
    rank_zero_info("100% read")
    assert capsys.readouterr().err == "read 3 files\n100% read\n"
