"""A process that trains for many steps and notes its memory along the way."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
from job import resident_size
from loop_arms import training_arms

STEPS = (100, 1_000, 10_000, 100_000)


def main() -> None:
    """Write bytes of resident memory and the number of Python's memory blocks after each number of steps.

    Arguments: the arm, the most steps, and the file to write.
    """
    arm, most, out = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    torch.set_num_threads(1)
    found: dict[int, tuple[int, int]] = {}

    def on_step(step: int) -> None:
        if step in STEPS:
            gc.collect()
            found[step] = (resident_size(os.getpid()), sys.getallocatedblocks())

    training_arms(logs=True, defaults=True, with_peer=arm == "lightning")[arm](most + 1, on_step)
    out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
