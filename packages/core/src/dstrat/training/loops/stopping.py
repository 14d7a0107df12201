"""Stops at the end of a step: deferred signals, and votes of all ranks."""

from __future__ import annotations

import atexit
import logging
import signal
import threading
import time
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import torch
from typing_extensions import Self

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator
    from types import FrameType, TracebackType

    from dstrat.interfaces.strategy import Strategy
    from dstrat.launch.ended_peers import SignalWatch

_log = logging.getLogger(__name__)


class Interrupted(KeyboardInterrupt):
    """A SIGINT that has stopped all ranks after the same step, so that they can still communicate."""

    signal: int = signal.SIGINT


class Terminated(SystemExit):
    """A SIGTERM, SIGHUP or SIGUSR1 that has stopped all ranks; its code is 128 plus the signal, as in shells."""

    @property
    def signal(self) -> int:
        return int(self.code) - 128 if self.code else signal.SIGTERM


class Interruption:
    """A context that defers the first SIGINT, SIGTERM or SIGHUP to the end of the step; a second one acts at once.

    A signal during the last step acts at the end of the context.  Ignored signals stay ignored, such as SIGHUP under
    ``nohup``.

    Args:
        preemption_deadline: Seconds from SIGTERM or SIGUSR1 until a scheduler ends the job; None where none does.
            With it SIGUSR1 is kept too, and a second SIGUSR1 has no effect: schedulers may repeat it.

    Attributes:
        requested: Number of the deferred signal; 0 without one.
    """

    def __init__(self, preemption_deadline: float | None = None) -> None:
        self.requested = 0
        self._requested_at = 0.0
        self._seconds = preemption_deadline
        self._previous: dict[int, Any] = {}
        self._actions: tuple[Callable[[int], None], ...] = ()
        # Only within the context, as they cannot be pickled.
        self._is_over: threading.Event | None = None
        self._signal_watch: SignalWatch | None = None

    def __enter__(self) -> Self:
        # Imported here, since only runs need them, and not in the handler, which may interrupt another import.
        from dstrat.launch.ended_peers import obey_when_peers_end, watch_signals
        from dstrat.launch.rank import note_signal
        from dstrat.launch.signals import leave_lost_terminal, stop_signals

        self._restore()  # SIGUSR1, if it has ended an earlier run
        self.requested = 0
        is_over = self._is_over = threading.Event()
        self._actions = (
            note_signal,
            lambda _: leave_lost_terminal(),
            lambda number: obey_when_peers_end(number, is_over),
        )
        if threading.current_thread() is threading.main_thread():  # Python has handlers in this thread only
            for number in stop_signals(includes_preemption=self._seconds is not None):
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: a handler installed by C code
                    self._previous[number] = signal.signal(number, self._on_signal)
            self._signal_watch = watch_signals(lambda: bool(self.requested), is_over)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._is_over is not None:
            self._is_over.set()
            self._is_over = None
        if self._signal_watch is not None:
            self._signal_watch.close()
            self._signal_watch = None
        if value is None or self.requested != signal.SIGUSR1:  # which may come again while a checkpoint is saved
            self._restore()
        if value is None and self._seconds is not None:
            _outlive_late_preemption()
        if self.requested and value is None:
            _act_on(self.requested)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self.requested, self._requested_at = number, time.monotonic()
        self._restore()  # a second signal acts at once
        if number == signal.SIGUSR1:  # schedulers may repeat it while the checkpoint is saved, and its default kills
            self._previous = {number: signal.signal(number, signal.SIG_IGN)}
        for act in self._actions:
            act(number)

    @property
    def remaining(self) -> float | None:
        """Seconds until a scheduler ends the job; None where none is known to do that."""
        if self._seconds is None or self.requested not in (signal.SIGTERM, signal.SIGUSR1):
            return None
        return self._requested_at + self._seconds - time.monotonic()

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def _outlive_late_preemption() -> None:
    """Keep a SIGUSR1 that comes after a complete run from ending the process; a handler of the user's stays."""
    is_main = threading.current_thread() is threading.main_thread()
    if is_main and signal.getsignal(signal.SIGUSR1) is signal.SIG_DFL:
        # A function, as processes that the program starts would inherit SIG_IGN, and a later run leaves it alone.
        signal.signal(signal.SIGUSR1, _log_late_preemption)
        # Python removes its handlers before it ends, which takes a second where torch is loaded.
        atexit.register(signal.signal, signal.SIGUSR1, signal.SIG_IGN)


def _log_late_preemption(_number: int, _frame: FrameType | None) -> None:
    _log.warning("SIGUSR1 came after the end of the run: there is nothing to save, and the program continues")


def _act_on(number: int) -> None:
    """Act on a signal with the handlers outside of the context.

    Raises:
        KeyboardInterrupt: For SIGINT without a handler.
        SystemExit: For another signal without a handler, so that the run cleans up; the default would kill the process.
    """
    if signal.getsignal(number) is not signal.SIG_DFL:
        signal.raise_signal(number)
    else:
        end_by(number)


def stop_by(number: int) -> NoReturn:
    """Raise the exception that stops the run on every rank after a signal.

    Raises:
        Interrupted: For SIGINT.
        Terminated: For another signal.
    """
    if number == signal.SIGINT:
        raise Interrupted
    raise Terminated(128 + number)


def end_by(number: int) -> NoReturn:
    """Raise the exception with which Python exits after a signal, in the process that called the Trainer.

    Raises:
        KeyboardInterrupt: For SIGINT.
        SystemExit: For another signal, with the exit code of shells.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def is_by_signal(error: KeyboardInterrupt | SystemExit) -> bool:
    """Return whether a signal ended a run, not ``sys.exit``: exit codes above 128 are signals, as in shells."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error.code, int) and error.code > 128)


# Common decisions of all ranks, after the same step


SECONDS_BETWEEN_VOTES = 0.5
MAX_STEPS_BETWEEN_VOTES = 500


class Votes:
    """Common decisions of all ranks about requests of any rank.

    The ranks vote by a small reduction about every half second.  Each vote also determines the number of the step of
    the next one, so that no collective is needed in other steps.

    Args:
        strategy: Has the collectives.
        step: Number of batches trained on already, equal on all ranks.
        beat: Notes progress of the run for hang detection; None without it.

    Attributes:
        next_at: Number of batches after which the ranks vote next.
    """

    def __init__(self, strategy: Strategy, step: int = 0, *, beat: Callable[[], None] | None = None) -> None:
        self._strategy, self._beat = strategy, beat
        self._is_alone = strategy.world_size == 1
        self.next_at = step + 1
        self._last_vote = (step, time.monotonic())

    def take(self, step: int, *requests: int) -> tuple[int, ...]:
        """Vote; collective.

        Args:
            step: Number of batches trained on.
            *requests: This rank's requests, each a number, 0 for none.

        Returns:
            The largest number of any rank, for each request.
        """
        if self._is_alone:
            return requests
        last_step, last_time = self._last_vote
        interval = 1  # the time of a step is unknown before the first one
        if step > last_step:
            seconds_per_step = (time.monotonic() - last_time) / (step - last_step)
            interval = min(MAX_STEPS_BETWEEN_VOTES, 1 + int(SECONDS_BETWEEN_VOTES / max(seconds_per_step, 1e-6)))
        # Negative, so that the maximum is the shortest interval of any rank.
        ballot = self._strategy.from_host(torch.tensor([*requests, -interval]))
        *agreed, steps = self._strategy.reduce(ballot, reduce_op="max").tolist()
        if self._beat is not None:
            self._beat()  # all ranks have come here: the job does not hang
        self.next_at = step - steps
        self._last_vote = (step, time.monotonic())
        return tuple(agreed)


# Votes in an evaluation, whose ranks may have different numbers of batches


B = TypeVar("B")


class EvaluationVotes:
    """Votes on whether a signal ends an evaluation.

    Ranks that have finished their batches continue to vote until all have.

    Args:
        strategy: Has the collectives.
        interruption: Has the deferred signal of this process.
        beat: Notes progress of the run for hang detection; None without it.
    """

    def __init__(
        self, strategy: Strategy, interruption: Interruption, *, beat: Callable[[], None] | None = None
    ) -> None:
        self._votes, self._interruption = Votes(strategy, beat=beat), interruption
        self._done = 0

    def between(self, batches: Iterable[B]) -> Iterator[B]:
        """Yield the batches of a loader, and vote between them; collective."""
        for batch in batches:
            yield batch
            self.count()

    def count(self) -> None:
        """Count a batch, and vote if it is time; collective then."""
        self._done += 1
        if self._done >= self._votes.next_at:
            self._vote(goes_on=True)

    def finish(self) -> None:
        """Vote until every rank has finished its loaders; collective."""
        while self._vote(goes_on=False):
            self._done = self._votes.next_at  # waits for the others at their pace, without more votes

    def _vote(self, *, goes_on: bool) -> bool:
        """Vote, and return whether any rank still has batches."""
        signal, any_goes_on = self._votes.take(self._done, self._interruption.requested, goes_on)
        if signal:
            stop_by(signal)
        return bool(any_goes_on)
