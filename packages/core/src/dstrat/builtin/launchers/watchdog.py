"""A process that ends the ranks when their supervisor is gone and can do nothing any more."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

from dstrat.builtin.launchers.job import JOB_VARIABLE

if TYPE_CHECKING:
    from pathlib import Path
    from types import TracebackType

    from typing_extensions import Self

# Reads the process groups, one in a line, until the pipe from the supervisor breaks.
# What has left its group is known by its environment, where the system shows that.
_SCRIPT = """
while read -r group; do groups="$groups -$group"; done
kill -KILL $groups
for file in $(grep -lszFx "JOB_VARIABLE=$1" /proc/[0-9]*/environ); do
    pid="${file#/proc/}"; kill -KILL "${pid%/environ}"
done
rm -rf "$1"
""".replace("JOB_VARIABLE", JOB_VARIABLE)


class Watchdog:
    """A shell of its own session that waits for the supervisor's end, however it comes.

    The kernel's parent-death signal ends the ranks sooner, yet it exists on Linux only, and neither reaches what the
    ranks have started nor a rank whose parent is a fork server.

    Args:
        folder: The job's folder, to be removed in the end.
    """

    def __init__(self, folder: Path) -> None:
        self._shell = subprocess.Popen(  # noqa: S603 - nothing of the user's is in it
            ["/bin/sh", "-c", _SCRIPT, "dstrat-watchdog", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            cwd="/",
            start_new_session=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shell.kill()
        self.let_go()
        self._shell.wait()

    def guard(self, group: int) -> None:
        """End this process group too."""
        assert self._shell.stdin is not None  # noqa: S101 - it is a pipe
        try:
            self._shell.stdin.write(f"{group}\n".encode())
            self._shell.stdin.flush()
        except BrokenPipeError:  # somebody ended the watchdog: the supervisor itself still ends the ranks
            return

    def let_go(self) -> None:
        """Close this process's end of the pipe; a forked rank does it, as it must not keep the watchdog waiting."""
        assert self._shell.stdin is not None  # noqa: S101 - it is a pipe
        self._shell.stdin.close()
