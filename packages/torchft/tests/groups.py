"""Replica groups as programs of their own, and what holds for their steps."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.request import urlopen

# Until a group has joined again the others take few steps, however slow its start is.
SLOW_ALONE = ("--seconds", 0.02, "--seconds-alone", 1)
PROGRAM = Path(__file__).with_name("group_program.py")


class Group:
    """A replica group, whose output is a file."""

    def __init__(self, folder, *command, name, **environ):
        self.path = folder / f"{name}.txt"
        self.environ = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
        with self.path.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, *map(str, command)],
                env=self.environ,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def text(self):
        return self.path.read_text()

    @property
    def rows(self):
        return [json.loads(row) for row in re.findall(r'\{"pid".*?\}', self.text)]

    @property
    def final(self):
        return re.search(r'"final": "(\w+)"', self.text)[1]

    def wait_for(self, condition, seconds=200):
        deadline = time.monotonic() + seconds
        while not condition(self):
            assert time.monotonic() < deadline, self.text
            time.sleep(0.05)

    def kill_rank(self):
        """Kill the rank that prints, and return when."""
        os.kill(self.rows[-1]["pid"], signal.SIGKILL)
        return time.time()

    def end(self, seconds=200):
        assert self.process.wait(seconds) == 0, self.text

    def kill(self):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def has_reached(step):
    return lambda group: bool(group.rows) and group.rows[-1]["step"] >= step


def check_counters(group):
    """Check that no step is left out or counted twice, by the Trainer, the schedulers and torchft."""
    rows = group.rows
    assert [row["step"] for row in rows] == list(range(rows[0]["step"], rows[-1]["step"] + 1))
    assert all(row["step"] == row["common"] == row["scheduled"] for row in rows)


def check_same_states(*groups):
    """Check that weights and optimizers are the same to the last bit after each step that both have taken."""
    states = [{row["step"]: (row["state"], row["lr"]) for row in group.rows} for group in groups]
    common = set.intersection(*map(set, states))
    assert common
    assert [step for step in common if len({state[step] for state in states}) > 1] == []


def wait_at_lighthouse(address, status):
    """Wait until the lighthouse has as many groups that ask for a quorum, and that are alive."""
    deadline = time.monotonic() + 200
    while status not in urlopen(f"{address}/status", timeout=10).read().decode():
        assert time.monotonic() < deadline, status
        time.sleep(0.02)
