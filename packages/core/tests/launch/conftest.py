"""Real programs that launch ranks, and the proof that nothing of them is left."""

from __future__ import annotations

import fcntl
import os
import pty
import subprocess
import sys
import termios
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@dataclass
class Outcome:
    """How a program ended."""

    code: int
    output: str
    errors: str


@dataclass
class Program:
    """A program that is run in a process of its own, and whose processes can be told from all others.

    What waits in it waits for ten minutes, so that a program which ends was ended; how soon is no matter of tests,
    which share the machine with others.
    """

    folder: Path
    mark: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: subprocess.Popen[str] | None = None

    def start(self, *words: str, text: str | None = None, **environ: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *words],
            stdin=subprocess.PIPE if text is not None else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.folder,
            env=self._environ(environ),
            start_new_session=True,
        )
        if text is not None:
            self.process.stdin.write(text)
            self.process.stdin.close()
            self.process.stdin = None

    def start_in_terminal(self, *words: str) -> int:
        """Start any program in a terminal of its own; return the terminal's other end."""
        terminal, inside = pty.openpty()
        self.process = subprocess.Popen(
            [*words],
            stdin=inside,
            stdout=inside,
            stderr=inside,
            cwd=self.folder,
            env=self._environ({}),
            start_new_session=True,
            # So that the terminal belongs to its session, and sends it signals.
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),  # noqa: PLW1509 - only a system call
        )
        os.close(inside)
        return terminal

    def _environ(self, more: dict[str, str]) -> dict[str, str]:
        temporary = self.folder / "tmp"
        temporary.mkdir(exist_ok=True)
        return {**os.environ, "MARK": self.mark, "TMPDIR": str(temporary), **more}

    def finish(self, timeout: float = 300.0) -> Outcome:
        output, errors = self.process.communicate(timeout=timeout)
        print(output, errors, sep="\n")  # what pytest shows when the test fails
        return Outcome(self.process.returncode, output, errors)

    def run(self, *words: str, timeout: float = 300.0, text: str | None = None, **environ: str) -> Outcome:
        self.start(*words, text=text, **environ)
        return self.finish(timeout)

    def wait_for(self, name: str, timeout: float = 300.0) -> str:
        """Wait for a file that a rank writes, and return what is in it."""
        deadline = time.monotonic() + timeout
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline, f"{name} has not come: {self.process.poll()}"
            time.sleep(0.01)
        return (self.folder / name).read_text()

    def processes(self) -> dict[int, str]:
        """Return the command lines of all living processes that descend from the program, by process id."""
        numbers = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        return {pid: self._read(pid, "cmdline") for pid in numbers if self.mark in self._read(pid, "environ")}

    @staticmethod
    def _read(pid: int, name: str) -> str:
        try:
            return Path(f"/proc/{pid}/{name}").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it has ended meanwhile
            return ""

    def wait_until_gone(self, timeout: float = 300.0) -> list[str]:
        """Return what is still there after a while: command lines, and folders of jobs."""
        deadline = time.monotonic() + timeout
        while (left := [*self.processes().values(), *self._folders()]) and time.monotonic() < deadline:
            time.sleep(0.02)
        return left

    def _folders(self) -> list[str]:
        return [str(path) for path in (self.folder / "tmp").glob("dstrat-job-*")]


@pytest.fixture
def program(tmp_path_factory):
    """A program that leaves nothing behind, whatever happens in the test."""
    folder = tmp_path_factory.mktemp("p")  # short, as the addresses of sockets that processes make in it must be
    (folder / "train.py").write_text((HERE / "train.py").read_text())
    program = Program(folder)
    yield program
    if program.process is not None and program.process.poll() is None:
        program.process.kill()
        program.process.communicate()
    assert program.wait_until_gone() == []


@pytest.fixture
def rank_functions(monkeypatch):
    """The functions that ranks of the fork server run; they have torch, and a process group."""
    monkeypatch.syspath_prepend(HERE)
    import rank_functions

    return rank_functions
