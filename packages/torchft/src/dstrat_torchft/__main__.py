"""Command ``python -m dstrat_torchft``: a lighthouse and the replica groups of one machine, restarted one by one."""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from dstrat.launch.signals import Interrupts
from dstrat_torchft.internals import LighthouseServer
from dstrat_torchft.replicas import GROUP, LIGHTHOUSE, NUM_GROUPS

if TYPE_CHECKING:
    from collections.abc import Sequence

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_POLL = 0.05
_STOP_SECONDS = 35.0  # a job of dstrat ends its ranks by itself within 30 s of a signal


@dataclass
class _Group:
    """A replica group: its processes, one after the other.

    Attributes:
        number: Its number, from 0.
        process: The present process.
        restarts: How often it has been started again.
        ended: Whether its process has ended, and is not started again.
        completed: Whether it has ended without an error.
    """

    number: int
    process: subprocess.Popen[bytes]
    restarts: int = 0
    ended: bool = False
    completed: bool = False


@dataclass(kw_only=True)
class ReplicaGroups:
    """The replica groups of a script on this machine; one that fails is started again, while the others continue.

    Args:
        command: Command of a group, which is a job of dstrat.
        num_groups: Number of groups.
        max_restarts: How often a group is started again.
        lighthouse: URL of the lighthouse.
    """

    command: Sequence[str]
    num_groups: int
    max_restarts: int
    lighthouse: str
    groups: list[_Group] = field(default_factory=list)

    def run(self) -> int:
        """Run until all groups have ended; return the exit code, 0 if any group has trained to the end."""
        with Interrupts() as interrupts:
            try:
                self.groups = [_Group(number, self._start(number)) for number in range(self.num_groups)]
                while not all(group.ended for group in self.groups):
                    if interrupts.received:
                        return self._stop(interrupts.received[0])
                    for group in self.groups:
                        if not group.ended and group.process.poll() is not None:
                            self._after_end(group)
                    time.sleep(_POLL)
            finally:
                for process in [group.process for group in self.groups if group.process.poll() is None]:
                    process.kill()  # its ranks end with it, as it is a job of dstrat
                    process.wait()
        return 0 if self._has_completed else 1

    @property
    def _has_completed(self) -> bool:
        return any(group.completed for group in self.groups)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        variables = {GROUP: str(number), NUM_GROUPS: str(self.num_groups), LIGHTHOUSE: self.lighthouse}
        environ = {**os.environ, **variables}
        # A terminal sends Ctrl-C to all processes of its group: this one forwards it instead, once.
        return subprocess.Popen(  # noqa: S603 - the user's own command
            self.command,
            env=environ,
            start_new_session=True,
            preexec_fn=_die_with_parent,  # noqa: PLW1509 - it calls the kernel only, and takes no lock
        )

    def _after_end(self, group: _Group) -> None:
        code = group.process.returncode
        group.ended = True
        if code == 0:
            group.completed = True
            return
        how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has exited with code {code}"
        if self._has_completed:
            # Alone it would train from its last checkpoint, or from the beginning.
            _print(f"replica group {group.number} {how}; not started again, as the training has ended in another group")
        elif group.restarts == self.max_restarts:
            _print(f"replica group {group.number} {how}; not started again: --max-restarts {self.max_restarts}")
        else:
            group.restarts += 1
            _print(f"replica group {group.number} {how}; restart {group.restarts} of {self.max_restarts}")
            group.process, group.ended = self._start(group.number), False

    def _stop(self, number: signal.Signals) -> int:
        """Forward a signal to the groups, which stop after their step; return the exit code."""
        running = [group.process for group in self.groups if group.process.poll() is None]
        for process in running:
            process.send_signal(number)
        deadline = time.monotonic() + _STOP_SECONDS
        while time.monotonic() < deadline and any(process.poll() is None for process in running):
            time.sleep(_POLL)
        return 128 + number  # as a shell reports a program that a signal has ended


def _die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies; without effect elsewhere than on Linux."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)


def _print(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m dstrat_torchft",
        description="Start a lighthouse and the replica groups of a script, each a job with "
        "strategy='torchft_ddp' or 'torchft_diloco'. A group that fails is started again by itself; it joins the "
        "others with their state.",
    )
    positive, count = partial(_read_number, least=1), partial(_read_number, least=0)
    parser.add_argument("--groups", type=positive, default=2, metavar="N", help="number of groups (default: 2)")
    parser.add_argument(
        "--max-restarts", type=count, default=3, metavar="N", help="how often each group is started again (default: 3)"
    )
    parser.add_argument(
        "--min-groups", type=positive, default=1, metavar="N", help="fewest groups that train (default: 1)"
    )
    parser.add_argument(
        "--join-timeout",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long groups wait at the lighthouse for another one that is alive (default: 60)",
    )
    parser.add_argument(
        "--heartbeat-timeout",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="seconds without a sign of life after which a group counts as dead, and the others continue (default: 5)",
    )
    parser.add_argument("script", help="the program of a group")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="its arguments")
    options = parser.parse_args(arguments)
    if options.min_groups > options.groups:
        parser.error(f"--min-groups {options.min_groups} is more than --groups {options.groups}")
    lighthouse = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=options.min_groups,
        join_timeout_ms=round(1000 * options.join_timeout),
        heartbeat_timeout_ms=round(1000 * options.heartbeat_timeout),
    )
    try:
        port = lighthouse.address().rpartition(":")[2]
        groups = ReplicaGroups(
            command=[sys.executable, options.script, *options.arguments],
            num_groups=options.groups,
            max_restarts=options.max_restarts,
            lighthouse=f"http://127.0.0.1:{port}",
        )
        return groups.run()
    finally:
        lighthouse.shutdown()


def _read_number(text: str, least: int) -> int:
    try:
        number = int(text)
    except ValueError:  # argparse would name this function in its message
        number = least - 1
    if number < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of {least} or more")
    return number


if __name__ == "__main__":
    sys.exit(main())
