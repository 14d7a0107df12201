"""Recovery of a job: its attempts, which failures are retried, and from where the next attempt continues.

The supervisor holds a :class:`Recovery` over all attempts.  Each attempt has a job folder of its own, with two files:
``attempt.json``, which ranks read, and ``ledger.jsonl``, to which global rank 0 adds a line for each checkpoint.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import mmap
import os
import re
import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dstrat.errors import RankFailedError
from dstrat.launch.rank import this_rank
from dstrat.launch.signals import show_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from dstrat.launch.signals import Interrupts

_ATTEMPT_FILE, _LEDGER_FILE, _STEP_FILE = "attempt.json", "ledger.jsonl", "step-"
_FIRST_WAIT, _LONGEST_WAIT = 1.0, 60.0  # seconds before a restart; doubled while attempts save nothing
_POLL = 0.02
_VARYING = re.compile(r"0x[0-9a-fA-F]+|\d+")  # addresses and numbers in the text of an error


@dataclass(frozen=True, kw_only=True, slots=True)
class FailedAttempt:
    """An attempt of a job that a failing rank has ended.

    Attributes:
        number: Its number, from 1.
        rank: Global rank of the primary failure.
        summary: That failure in one line, such as ``"rank 1 of 2 was killed by SIGKILL"``.
        step: Number of optimizer steps that the rank had done; None before training began.
        traceback: The rank's traceback, empty if there is none.
        batches: Number of batches that the rank had trained on in this attempt.
    """

    number: int
    rank: int
    summary: str
    step: int | None
    traceback: str
    batches: int = 0

    def __str__(self) -> str:
        when = "before training began" if self.step is None else f"after step {self.step}"
        return f"{self.summary}, {when}"


@dataclass(frozen=True, kw_only=True, slots=True)
class SavePoint:
    """The state of a fit that another attempt can continue from.

    Attributes:
        launch: Number of the launch in the program, which tells one fit from another.
        checkpoint: Path or URL of the checkpoint; None for the beginning of the fit.
        step: Number of optimizer steps done.
        log_dirs: Folders of the loggers, in their order; None for a logger without one.
        bookmarks: The end of what each logger had written; None for a logger that cannot return to it.
    """

    launch: int
    checkpoint: str | None
    step: int
    log_dirs: list[str | None]
    bookmarks: list[Any]


# The side of the ranks


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """The attempt that a rank belongs to.

    Attributes:
        number: Its number, from 1.
        total: Largest number of attempts.
        failed: The attempts before it.
        save_points: From where it continues, one for each launch that an earlier attempt has begun.
    """

    number: int
    total: int
    failed: tuple[FailedAttempt, ...] = ()
    save_points: tuple[SavePoint, ...] = ()

    def save_point(self, launch: int) -> SavePoint | None:
        """Return from where a launch continues; None where it begins for the first time."""
        return next((point for point in self.save_points if point.launch == launch), None)


def this_attempt() -> Attempt | None:
    """Return the attempt of this rank; None in other processes, and in jobs that are not restarted."""
    rank = this_rank()
    if rank is None:
        return None
    try:
        content = json.loads((rank.folder / _ATTEMPT_FILE).read_text())
    except FileNotFoundError:
        return None
    return Attempt(
        number=content["number"],
        total=content["total"],
        failed=tuple(FailedAttempt(**each) for each in content["failed"]),
        save_points=tuple(SavePoint(**each) for each in content["save_points"]),
    )


def record_save_point(point: SavePoint) -> None:
    """Add a line to the ledger, before the checkpoint is written: whether it is complete is checked when it is used."""
    rank = this_rank()
    assert rank is not None  # noqa: S101 - called only where there is an attempt
    line = json.dumps(dataclasses.asdict(point)) + "\n"
    with contextlib.suppress(FileNotFoundError), (rank.folder / _LEDGER_FILE).open("a") as ledger:
        ledger.write(line)


class StepRecord:
    """The step that this rank is at, in memory that its supervisor can read after it was killed.

    Args:
        step: Number of optimizer steps done when training begins.
    """

    def __init__(self, step: int) -> None:
        rank = this_rank()
        assert rank is not None  # noqa: S101 - as above
        # Mapped: each batch costs two assignments and no system call, and the kernel keeps them after SIGKILL.
        with _step_file(rank.folder, int(os.environ["RANK"])).open("w+b") as file:
            file.truncate(16)
            self._values = memoryview(mmap.mmap(file.fileno(), 16)).cast("q")
        self._values[0] = step

    def count_batch(self, step: int) -> None:
        """Record a batch that has been trained on, and the number of optimizer steps done."""
        self._values[0] = step
        self._values[1] += 1


def _step_file(folder: Path, rank: int) -> Path:
    return folder / f"{_STEP_FILE}{rank}"


def _read_steps(folder: Path, rank: int) -> tuple[int | None, int]:
    """Return a rank's number of optimizer steps, None before training, and of batches in this attempt."""
    try:
        steps, batches = memoryview(_step_file(folder, rank).read_bytes()).cast("q")
    except (OSError, ValueError):  # ValueError: an empty file, of a rank that was killed between the two calls
        return None, 0
    return steps, batches


# The side of the supervisor


@dataclass
class Recovery:
    """The attempts of a job.

    A failure is retried unless the next attempt would fail in the same way:

    - an exception before the first batch of the first attempt was trained on, such as for a bad argument;
    - an exit of a rank by itself (``sys.exit``), or a stop of the job by a signal;
    - the same error as in an earlier attempt, after the same step.  SIGKILL is never the same error, because it comes
      from outside of the program.

    Args:
        max_restarts: Largest number of attempts after the first.
        recovers_checkpoint: Returns whether a checkpoint is complete, by its path and number of optimizer steps.

    Attributes:
        failed: The attempts that have failed.
    """

    max_restarts: int
    recovers_checkpoint: Callable[[str, int], bool]
    failed: list[FailedAttempt] = field(default_factory=list)
    _ledger: list[SavePoint] = field(default_factory=list)
    _resumed: tuple[SavePoint, ...] = ()
    _wait: float = _FIRST_WAIT / 2  # doubled before it is first used

    @property
    def total(self) -> int:
        """Largest number of attempts."""
        return self.max_restarts + 1

    def begin_attempt(self, folder: Path) -> None:
        """Write for the ranks which attempt this is, and from where it continues."""
        if not self.max_restarts:
            return
        attempt = Attempt(
            number=len(self.failed) + 1, total=self.total, failed=tuple(self.failed), save_points=self._resumed
        )
        (folder / _ATTEMPT_FILE).write_text(json.dumps(dataclasses.asdict(attempt)))

    def end_attempt(self, folder: Path, error: RankFailedError) -> float:
        """Record a failed attempt, and print a line about the restart.

        Args:
            folder: The job's folder, which is removed afterwards.
            error: The failure.

        Returns:
            Seconds to wait before the next attempt.

        Raises:
            RankFailedError: It is not retried; the message names all attempts.
        """
        if not self.max_restarts:
            raise error
        reason, failed = self._judge(folder, error)
        repeated = self._repeated(failed, error)
        self.failed.append(failed)
        if reason is not None:
            raise self._final_error(error, reason, repeated) from None
        self._read(folder)
        before, self._resumed = self._resumed, self._newest_save_points()
        self._wait = _FIRST_WAIT if self._resumed != before else min(2 * self._wait, _LONGEST_WAIT)
        start = _describe_start(self._resumed)
        show_line(f"{failed}; attempt {failed.number + 1} of {self.total} begins in {self._wait:g} s {start}")
        return self._wait

    @property
    def restart_count(self) -> int:
        """Number of attempts that have failed."""
        return len(self.failed)

    def why_final(self, folder: Path, error: RankFailedError) -> str | None:
        """Return why a failure is not retried; None where it is."""
        return self._judge(folder, error)[0]

    def can_continue(self, folder: Path, launch: int) -> bool:
        """Return whether a launch has saved a complete checkpoint; called while no rank writes."""
        self._read(folder)
        return any(point.launch == launch and point.checkpoint is not None for point in self._newest_save_points())

    def regroup(self, folder: Path, error: RankFailedError, num_ranks: int) -> None:
        """Record a failed attempt, and print a line about the ranks that go on.

        Args:
            folder: The job's folder.
            error: The failure, which is retried.
            num_ranks: Their number.
        """
        _, failed = self._judge(folder, error)
        self.failed.append(failed)
        self._take_newest(folder)
        ranks = f"the other rank goes on as attempt {failed.number + 1} of {self.total}"
        if num_ranks > 1:
            ranks = f"the other {num_ranks} ranks go on as attempt {failed.number + 1} of {self.total}"
        show_line(f"{failed}; {ranks} {_describe_start(self._resumed)}")

    def grow(self, folder: Path, num_new: int, num_ranks: int) -> None:
        """Print a line about processes that take the places of ranks that have died; called while no rank writes.

        Args:
            folder: The job's folder.
            num_new: Number of these processes.
            num_ranks: Number of ranks with them.
        """
        self._take_newest(folder)
        new = {0: "no new process", 1: "a new process"}.get(num_new, f"{num_new} new processes")
        show_line(f"{new} joined: {num_ranks} ranks go on {_describe_start(self._resumed)}")

    def _take_newest(self, folder: Path) -> None:
        """Let the ranks of the next group continue from the newest checkpoints."""
        self._read(folder)
        self._resumed = self._newest_save_points()
        for path in folder.glob(f"{_STEP_FILE}*"):
            path.unlink()  # of ranks that have other numbers now; who has mapped one keeps it

    def end(self) -> None:
        """Print which attempts have failed before the one that has succeeded."""
        if self.failed:
            lines = "; ".join(f"attempt {each.number}: {each}" for each in self.failed)
            show_line(f"attempt {len(self.failed) + 1} of {self.total} has ended without a failure ({lines})")

    def _judge(self, folder: Path, error: RankFailedError) -> tuple[str | None, FailedAttempt]:
        """Return why a failure is not retried, None where it is, and the record of its attempt."""
        step, batches = _read_steps(folder, error.rank)
        failed = FailedAttempt(
            number=len(self.failed) + 1,
            rank=error.rank,
            summary=str(error).strip().partition("\n")[0],
            step=step,
            traceback=error.rank_traceback,
            batches=batches,
        )
        exits = error.exit_code is not None and error.exit_code >= 0  # neither killed by a signal nor hung
        reason = None
        if exits and error.summary.partition(":")[0] in ("", "SystemExit"):
            reason = "the rank has exited by itself"
        elif exits and not self.failed and not batches:
            reason = "it has failed before its first batch was trained on, and would again"
        elif (repeated := self._repeated(failed, error)) is not None:
            reason = f"attempt {repeated.number} has failed with the same error after the same step"
        elif len(self.failed) >= self.max_restarts:
            reason = f"max_restarts={self.max_restarts}"
        return reason, failed

    def _repeated(self, failed: FailedAttempt, error: RankFailedError) -> FailedAttempt | None:
        return next((each for each in self.failed if _is_repeated(each, failed, error)), None)

    def _read(self, folder: Path) -> None:
        """Add the lines of the ledger, before the folder is removed; the next attempt writes another one."""
        self._ledger += _read_ledger(folder)
        (folder / _LEDGER_FILE).unlink(missing_ok=True)

    def _final_error(self, error: RankFailedError, reason: str, repeated: FailedAttempt | None) -> RankFailedError:
        lines = [f"attempt {each.number} of {self.total}: {each}" for each in self.failed]
        texts = [str(error), "\n".join([f"Not restarted: {reason}.", *lines])]
        if repeated is not None and repeated.traceback:
            texts.append(f"Traceback of rank {repeated.rank} in attempt {repeated.number}:\n\n{repeated.traceback}")
        return RankFailedError(
            "\n\n".join(texts),
            rank=error.rank,
            exit_code=error.exit_code,
            rank_traceback=error.rank_traceback,
            summary=error.summary,
            attempts=tuple(lines),
        )

    def _newest_save_points(self) -> tuple[SavePoint, ...]:
        """Return the complete one with the most steps, of those with as many the latest, of each launch."""
        newest = {}
        for launch in dict.fromkeys(point.launch for point in self._ledger):
            points = [point for point in self._ledger if point.launch == launch]
            ordered = sorted(points, key=lambda point: point.step)  # stable: of as many steps the latest is last
            newest[launch] = next(
                (
                    point
                    for point in reversed(ordered)
                    if point.checkpoint is not None and self.recovers_checkpoint(point.checkpoint, point.step)
                ),
                points[0],  # the beginning of the fit
            )
        return tuple(newest.values())


def path_exists(path: str, _step: int) -> bool:
    """Return whether there is a checkpoint at a path of this machine."""
    return os.path.exists(path)  # noqa: PTH110 - a text


def wait_for_restart(seconds: float, interrupts: Interrupts) -> None:
    """Wait before a restart.

    Raises:
        KeyboardInterrupt: Ctrl-C has arrived.
        SystemExit: Another signal to stop has arrived.
    """
    deadline = time.monotonic() + seconds
    # In short sleeps: time.sleep goes on after a signal whose handler raises nothing.
    while time.monotonic() < deadline and not interrupts.received:
        time.sleep(_POLL)
    interrupts.raise_received()


def _is_repeated(earlier: FailedAttempt, failed: FailedAttempt, error: RankFailedError) -> bool:
    """Return whether two attempts have failed with the same error after the same step, in any of the ranks."""
    if error.exit_code == -signal.SIGKILL:
        return False
    # Neither has trained: the cause may be outside, such as a data store that is away for longer than a restart takes.
    if not (earlier.batches or failed.batches):
        return False
    errors = [_VARYING.sub("#", each.summary) for each in (earlier, failed)]
    return earlier.step == failed.step and errors[0] == errors[1]


def _read_ledger(folder: Path) -> list[SavePoint]:
    points = []
    with contextlib.suppress(FileNotFoundError):
        for line in (folder / _LEDGER_FILE).read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):  # the last one, of a rank that was killed
                points.append(SavePoint(**json.loads(line)))
    return points


def _describe_start(points: Sequence[SavePoint]) -> str:
    """Return from where the last of several launches continues."""
    point = max(points, key=lambda point: point.launch, default=None)
    if point is None or point.checkpoint is None:
        return "from the beginning, as no complete checkpoint was saved"
    return f"from {point.checkpoint!r} (step {point.step})"
