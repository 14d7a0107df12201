"""Which failures are retried, how long a restart waits, and from where it continues."""

import signal

import pytest

from dstrat.errors import RankFailedError
from dstrat.launch import rank
from dstrat.launch.recovery import (
    Recovery,
    SavePoint,
    StepRecord,
    path_exists,
    record_save_point,
    this_attempt,
    wait_for_restart,
)
from dstrat.launch.signals import Interrupts


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return the job's folder of this process, which is rank 1 for the time of the test."""
    folder = tmp_path / "job"
    folder.mkdir()
    monkeypatch.setattr(rank, "_this_rank", rank.ThisRank(folder=folder, runs_script=False))
    monkeypatch.setenv("RANK", "1")
    return folder


def killed(number=signal.SIGKILL):
    return RankFailedError(f"rank 1 of 2 was killed by {number.name}", rank=1, exit_code=-number)


def raised(text="ValueError: boom"):
    return RankFailedError(f"rank 1 of 2 failed: {text}\n\n{text}", rank=1, exit_code=1, summary=text)


def hung():
    return RankFailedError("rank 1 of 2 hung: no progress for 9 s", rank=1)


def train(steps):
    record = StepRecord(0)
    for step in range(steps):
        record.count_batch(step + 1)


def test_rank_that_was_killed_is_retried_until_no_restart_remains(folder):
    recovery = Recovery(2, path_exists)
    for number in (1, 2):
        recovery.begin_attempt(folder)
        assert this_attempt().number == number
        recovery.end_attempt(folder, killed())
    with pytest.raises(RankFailedError, match="Not restarted: max_restarts=2") as failed:
        recovery.end_attempt(folder, killed())
    assert failed.value.attempts == tuple(
        f"attempt {number} of 3: rank 1 of 2 was killed by SIGKILL, before training began" for number in (1, 2, 3)
    )


def test_rank_that_was_killed_when_training_began_is_retried(folder):
    (folder / "step-1").touch()  # StepRecord has created its file, and not yet written to it
    recovery = Recovery(1, path_exists)
    recovery.end_attempt(folder, killed())
    assert recovery.failed[0].step is None


def test_job_without_restarts_fails_as_before(folder):
    recovery, error = Recovery(0, path_exists), killed()
    recovery.begin_attempt(folder)
    assert this_attempt() is None
    with pytest.raises(RankFailedError) as failed:
        recovery.end_attempt(folder, error)
    assert failed.value is error


@pytest.mark.parametrize(
    "error",
    [
        RankFailedError("rank 1 of 2 exited with code 3", rank=1, exit_code=3),
        RankFailedError("rank 1 of 2 exited with code 0 before the others", rank=1, exit_code=0),
        raised("SystemExit: no data"),
    ],
)
def test_exit_of_a_rank_by_itself_is_not_retried(folder, error):
    train(3)
    with pytest.raises(RankFailedError, match="Not restarted: the rank has exited by itself"):
        Recovery(3, path_exists).end_attempt(folder, error)


def test_exception_before_the_first_batch_is_retried_in_later_attempts_only(folder):
    with pytest.raises(RankFailedError, match="failed before its first batch was trained on"):
        Recovery(3, path_exists).end_attempt(folder, raised())
    recovery = Recovery(3, path_exists)
    recovery.end_attempt(folder, killed())
    recovery.end_attempt(folder, raised())


@pytest.mark.parametrize("error", [raised("KeyError: 0x7f12 at 3"), killed(signal.SIGSEGV), hung()])
def test_same_error_is_retried_after_another_step_only(folder, error):
    recovery = Recovery(5, path_exists)
    train(3)
    recovery.end_attempt(folder, error)
    train(4)
    recovery.end_attempt(folder, raised("KeyError: 0x7f99 at 4") if error.summary else error)
    with pytest.raises(RankFailedError, match="attempt 2 has failed with the same error after the same step"):
        recovery.end_attempt(folder, error)


def test_the_same_error_before_training_is_retried_in_later_attempts(folder):
    recovery = Recovery(5, path_exists)
    train(3)
    recovery.end_attempt(folder, raised("ConnectionError: the store is away"))
    (folder / "step-1").unlink()  # each attempt has a folder of its own
    for _ in range(3):
        recovery.end_attempt(folder, raised("ConnectionError: the store is away"))


def test_another_error_after_the_same_step_is_retried(folder):
    recovery = Recovery(5, path_exists)
    train(3)
    recovery.end_attempt(folder, raised("KeyError: 'a'"))
    recovery.end_attempt(folder, raised("ValueError: b"))


def test_wait_is_doubled_while_nothing_is_saved(folder, tmp_path, capsys):
    recovery = Recovery(12, path_exists)
    assert [recovery.end_attempt(folder, killed()) for _ in range(8)] == [1, 2, 4, 8, 16, 32, 60, 60]
    save(tmp_path / "a.ckpt", 10)
    assert recovery.end_attempt(folder, killed()) == 1
    assert recovery.end_attempt(folder, killed()) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == (
        "rank 1 of 2 was killed by SIGKILL, before training began; attempt 11 of 13 begins in 2 s from "
        f"'{tmp_path}/a.ckpt' (step 10)"
    )


def save(path, step, *, launch=0, is_complete=True):
    record_save_point(
        SavePoint(
            launch=launch, checkpoint=None if path is None else str(path), step=step, log_dirs=[], bookmarks=[step]
        )
    )
    if path is not None and is_complete:
        path.touch()


def test_attempt_continues_from_the_complete_checkpoint_with_the_most_steps(folder, tmp_path):
    recovery = Recovery(3, path_exists)
    save(None, 0)
    save(tmp_path / "a.ckpt", 20)
    save(tmp_path / "b.ckpt", 10)
    save(tmp_path / "c.ckpt", 30, is_complete=False)
    save(None, 0, launch=1)
    save(tmp_path / "d.ckpt", 5, launch=1, is_complete=False)
    recovery.end_attempt(folder, killed())
    recovery.begin_attempt(folder)
    attempt = this_attempt()
    assert attempt.number == 2
    assert [each.summary for each in attempt.failed] == ["rank 1 of 2 was killed by SIGKILL"]
    assert attempt.save_point(0).checkpoint == str(tmp_path / "a.ckpt")
    assert attempt.save_point(1).checkpoint is None
    assert attempt.save_point(2) is None


def test_line_that_a_killed_rank_has_not_finished_is_left_out(folder, tmp_path):
    save(tmp_path / "a.ckpt", 10)
    with (folder / "ledger.jsonl").open("a") as ledger:
        ledger.write('{"launch": 0, "check')
    recovery = Recovery(3, path_exists)
    recovery.end_attempt(folder, killed())
    recovery.begin_attempt(folder)
    assert this_attempt().save_point(0).step == 10


@pytest.mark.parametrize(("number", "error"), [(signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit)])
def test_signal_ends_the_wait_for_a_restart(number, error):
    with Interrupts() as interrupts:
        signal.raise_signal(number)
        with pytest.raises(error):
            wait_for_restart(600, interrupts)  # longer than the test may take
