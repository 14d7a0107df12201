"""A process that counts the function calls of a step, Python's and C's: the same number in each run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from loop_arms import let_go, training_arms, validation_arms

WARMUP, STEPS = 20, 100


class Counter:
    """Counts the calls between two steps.

    Attributes:
        calls: Calls of functions, written in Python or C.
    """

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> None:
        """Take note of a step's beginning."""
        if step == WARMUP:
            sys.setprofile(self._count)
        elif step == WARMUP + STEPS:
            sys.setprofile(None)

    def _count(self, frame: Any, event: str, argument: Any) -> None:  # noqa: ARG002 - setprofile gives it
        if event == "call" or (event == "c_call" and argument is not sys.setprofile):
            self.calls += 1


def main() -> None:
    """Count, and write the calls per step of each arm; the file is the only argument."""
    torch.set_num_threads(1)
    found: dict[str, dict[str, int]] = {}
    for what, arms in {
        "bare": training_arms(logs=False, defaults=False, with_peer=False),
        "logging": training_arms(logs=True, defaults=False, with_peer=False),
        "validation": validation_arms(with_peer=False),
    }.items():
        found[what] = {}
        for name, arm in arms.items():
            counter = Counter()
            arm(WARMUP + STEPS + 1, counter)
            let_go()
            per_step, rest = divmod(counter.calls, STEPS)
            if rest:
                raise RuntimeError(f"{name} made {counter.calls} calls in {STEPS} steps: not the same in each")
            found[what][name] = per_step
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
