"""Tests of failing ranks: the job ends soon, names the rank, leaves nothing."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from dstrat.testing.ranks.launching import ERROR_MESSAGE, can_look, launch
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, not_declared, standard

if TYPE_CHECKING:
    from dstrat.testing.ranks.jobs import Subject
    from dstrat.testing.ranks.launching import Fault, JobResult

_NEEDS_NO_SCRIPT = ("fork", "forkserver")
_WAITS = 4.0  # seconds that a collective waits for a rank that hangs, where the strategy lets it be chosen
_SOON = 6.0  # seconds until a job has ended whose rank raises or dies; 1 to 2 on an idle machine
_MUCH_LATER = 10.0  # seconds that a collective waits there, so that it shows where something does


class Failures(StrategyTests):
    """Jobs that the strategy launches itself, with start_method="fork"."""

    @standard("processes", "failures")
    def test_a_rank_that_raises_ends_the_job_with_its_own_words(self, pair: int) -> None:
        outcome = self._launched(pair, "raises")
        self._check_end(outcome, "raised", pair)
        if ERROR_MESSAGE not in outcome.error:
            fail(
                f"the error does not say what rank {pair - 1} raised, ValueError({ERROR_MESSAGE!r})",
                expected="the traceback of the rank that failed first is part of the error.",
                details=outcome.error,
            )

    @standard("processes", "failures")
    def test_a_rank_that_dies_ends_the_job(self, pair: int) -> None:
        self._check_end(self._launched(pair, "dies"), "died", pair)

    @standard("processes", "failures")
    def test_a_rank_that_hangs_ends_the_job_after_the_timeout(self, pair: int) -> None:
        if not self.subject.takes("timeout"):
            not_declared(f"{self.alias} takes no timeout")
        self._check_end(self._launched(pair, "hangs"), "hung", pair, waits=_WAITS)

    @standard("processes", "failures")
    def test_no_process_is_left_after_a_failure(self, pair: int) -> None:
        self._check_no_processes(self._launched(pair, "raises"), "a rank had raised")

    @standard("processes", "failures")
    def test_no_process_is_left_after_a_training(self, pair: int) -> None:
        outcome = self._launched(pair, "nothing")
        if outcome.error:
            fail("a training that launches its own ranks failed", details=outcome.error)
        self._check_no_processes(outcome, "a training had ended well")

    @standard("basic", "failures")
    def test_an_error_in_a_step_reaches_the_user(self) -> None:
        if self.fewest > 1:
            not_declared(f"{type(self).__name__} declares world_sizes = {self.world_sizes}")
        job = {"subject": self.subject, "accelerator": self.accelerator, "devices": 1, "fault": "raises"}
        # New ranks here and below: launch replaces __main__ and adopts orphans, which the next function would find.
        outcome = self.job(launch, 1, needs_new_ranks=True, **job)[0][0]
        if ERROR_MESSAGE not in outcome.error:
            fail(
                f"a training step raised ValueError({ERROR_MESSAGE!r}) on one device, and fit "
                f"{'returned as if nothing had happened' if not outcome.error else f'raised {outcome.error}'}",
                expected="exceptions of the user's module pass through the strategy as they are.",
            )

    def _launched(self, devices: int, fault: Fault) -> JobResult:
        __tracebackhide__ = True
        self.need_processes(devices)
        job = {"accelerator": self.accelerator, "devices": devices, "fault": fault}
        subject = self.launched(self._collective_timeout(devices, fault))
        return self.shared_job(launch, 1, needs_new_ranks=True, subject=subject, **job)[0][0]

    def launched(self, seconds: float | None = None) -> Subject:
        """Return the strategy with a start method that needs no script, and a timeout where it takes one."""
        __tracebackhide__ = True
        subject = self.subject
        if seconds is not None and subject.takes("timeout"):
            subject = subject.with_options(timeout=timedelta(seconds=seconds))
        if subject.takes("start_method"):
            return subject.with_options(start_method="fork")
        method = subject.make().start_method
        if method not in _NEEDS_NO_SCRIPT:
            not_declared(f"{self.alias} takes no start_method, and {method!r} starts no ranks from here")
        return subject

    def _collective_timeout(self, devices: int, fault: Fault) -> float | None:
        """Return how long collectives wait for other ranks; None where it does not matter."""
        __tracebackhide__ = True
        if fault == "nothing":
            return None
        return _WAITS if fault == "hangs" else _MUCH_LATER + self._busyness(devices)

    def _busyness(self, devices: int) -> float:
        """Return how many seconds more a job may take on this machine at this moment."""
        __tracebackhide__ = True
        return 3 * round(self._launched(devices, "nothing").seconds, 1)

    def _check_end(self, outcome: JobResult, event: str, world_size: int, *, waits: float = 0.0) -> None:
        __tracebackhide__ = True
        failing = world_size - 1
        if not outcome.error:
            fail(
                f"rank {failing} of {world_size} {event}, and fit returned as if nothing had happened",
                expected="RankFailedError, which names the rank.",
                fix="let exceptions of the module pass through every method of the strategy.",
            )
        if outcome.rank != failing:
            fail(
                f"rank {failing} of {world_size} {event}, and the error names "
                f"{'no rank' if outcome.rank is None else f'rank {outcome.rank}'}",
                expected="the rank that failed first; the others only lose their connection to it.",
                fix="on_exception must free what others wait for at once, and neither raise nor communicate.",
                details=outcome.error,
            )
        soon = waits + _SOON + self._busyness(world_size)
        if outcome.seconds > soon:
            fail(
                f"it took {outcome.seconds:.0f} s until the job had ended after rank {failing} {event}",
                expected=f"less than {soon:.0f} s here: nothing waits for a rank that is gone.",
                fix="on_exception must free what others wait for at once, and not communicate.",
            )

    def _check_no_processes(self, outcome: JobResult, when: str) -> None:
        __tracebackhide__ = True
        if not can_look():
            not_declared("this system has no /proc to look for processes in")
        if outcome.running:
            fail(
                f"{len(outcome.running)} processes still ran after {when}: {'; '.join(outcome.running[:3])}",
                expected="every process that the strategy starts ends with the job.",
                fix="end it in teardown, and start it in the rank's own session so that the launcher finds it.",
            )
