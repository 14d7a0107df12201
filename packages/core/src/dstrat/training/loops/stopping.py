"""Stop requests at the end of a step: signals, and votes of all ranks."""

from __future__ import annotations

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


_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Interrupted(KeyboardInterrupt):
    """A SIGINT on which all processes agreed: they have stopped after the same step, and can still communicate."""

    signal: int = signal.SIGINT


class Terminated(SystemExit):
    """A SIGTERM or SIGHUP on which all processes agreed; its code is the one that shells expect, such as 143."""

    @property
    def signal(self) -> int:
        return int(self.code) - 128 if self.code else signal.SIGTERM


class Interruption:
    """A context that keeps a first SIGINT, SIGTERM or SIGHUP for the end of the step; a second one interrupts at once.

    What comes too late for the last step acts when the context ends.  Ignored signals stay ignored (a program in the
    background of a script, ``nohup``).

    Attributes:
        requested: Number of the signal that came, 0 before any.
    """

    def __init__(self) -> None:
        self.requested = 0
        self._previous: dict[int, Any] = {}
        self._actions: tuple[Callable[[int], None], ...] = ()

    def __enter__(self) -> Self:
        # Only runs need them; and not in the handler, which may come in the middle of an import.
        from dstrat.launch.rank import note_signal
        from dstrat.launch.signals import leave_lost_terminal

        self.requested = 0
        self._actions = (note_signal, lambda _: leave_lost_terminal())
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) not in (signal.SIG_IGN, None):  # None: not installed from Python
                    self._previous[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._restore()
        if self.requested and value is None:
            _act_on(self.requested)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signal module's signature
        self.requested = number
        self._restore()
        for act in self._actions:
            act(number)

    def _restore(self) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}


def _act_on(number: int) -> None:
    """Do what a signal does here outside of the context, but for ending the process without the end of the run.

    Raises:
        KeyboardInterrupt: For SIGINT.
        SystemExit: For another one that has no handler.
    """
    if signal.getsignal(number) is not signal.SIG_DFL:
        signal.raise_signal(number)
    elif number == signal.SIGINT:
        raise KeyboardInterrupt
    else:
        raise SystemExit(128 + number)


def stop_by(number: int) -> None:
    """Raise what a signal asks for, in every process.

    Raises:
        Interrupted: For SIGINT.
        Terminated: For another one, with the code that shells expect, such as 143 for SIGTERM.
    """
    if number == signal.SIGINT:
        raise Interrupted
    raise Terminated(128 + number)


def end_by(number: int) -> NoReturn:
    """Raise what Python ends with as a shell expects, in the process that asked for a run that a signal has ended.

    Raises:
        KeyboardInterrupt: For SIGINT.
        SystemExit: For another one.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)


def is_by_signal(error: KeyboardInterrupt | SystemExit) -> bool:
    """Return whether a run ended by a signal, rather than by ``sys.exit``."""
    return isinstance(error, KeyboardInterrupt) or (isinstance(error.code, int) and error.code > 128)  # as in a shell


# Joint decisions of all ranks, after the same step.


SECONDS_BETWEEN_VOTES = 0.5
MOST_STEPS_BETWEEN_VOTES = 500


class Votes:
    """Turns what any process wishes into what all of them do.

    The processes vote by one small reduction about every half second, at step numbers that the last vote fixed for
    all of them, so that they agree without a collective in every step.

    Args:
        strategy: Whose processes vote.
        step: Number of batches trained on already, the same in every process.

    Attributes:
        next_at: Number of batches after which the processes vote next.
    """

    def __init__(self, strategy: Strategy, step: int = 0) -> None:
        self._strategy = strategy
        from dstrat.launch.progress import beat  # only runs need it

        self._beat = beat
        self._alone = strategy.world_size == 1
        self.next_at = step + 1
        self._last_vote = (step, time.monotonic())

    def take(self, step: int, *wishes: int) -> tuple[int, ...]:
        """Vote; collective.

        Args:
            step: Number of batches trained on.
            *wishes: What this process wishes, each as a number of which 0 means no.

        Returns:
            The largest number that any process gave, for each of the wishes.
        """
        if self._alone:
            return wishes
        last_step, last_time = self._last_vote
        seconds_per_step = (time.monotonic() - last_time) / max(1, step - last_step)
        interval = min(MOST_STEPS_BETWEEN_VOTES, 1 + int(SECONDS_BETWEEN_VOTES / max(seconds_per_step, 1e-6)))
        ballot = torch.tensor([*wishes, -interval], device=self._strategy.root_device)
        *agreed, steps = self._strategy.reduce(ballot, reduce_op="max").tolist()
        self._beat()
        self.next_at = step - steps
        self._last_vote = (step, time.monotonic())
        return tuple(agreed)


# Votes of an evaluation, whose processes may have different numbers of batches


B = TypeVar("B")


class EvaluationVotes:
    """Lets several processes agree, about every half second, on whether a signal ends their evaluation.

    Those that are through with their batches go on voting until all are.

    Args:
        strategy: Whose processes evaluate.
        interruption: Knows the signals of this process.
    """

    def __init__(self, strategy: Strategy, interruption: Interruption) -> None:
        self._votes, self._interruption = Votes(strategy), interruption
        self._done = 0

    def between(self, batches: Iterable[B]) -> Iterator[B]:
        """Yield the batches of a loader, and vote between them; collective."""
        for batch in batches:
            yield batch
            self.count()

    def count(self) -> None:
        """Take note of a batch, and vote when it is time; collective then."""
        self._done += 1
        if self._done >= self._votes.next_at:
            self._vote(goes_on=True)

    def finish(self) -> None:
        """Vote until every process is through with its loaders; collective."""
        while self._vote(goes_on=False):
            self._done = self._votes.next_at  # at the pace of the others, so that these are not asked more often

    def _vote(self, *, goes_on: bool) -> bool:
        """Vote; return whether any process will again."""
        signal, anyone_goes_on = self._votes.take(self._done, self._interruption.requested, goes_on)
        if signal:
            stop_by(signal)
        return bool(anyone_goes_on)
