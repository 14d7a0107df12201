"""A process that runs the arms of a loop in turn and times each step of them in its steady state."""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from loop_arms import has_peer, let_go, training_arms, validation_arms
from workload import Clock

WARMUP = 50
"""Steps before the time starts."""


def main() -> None:
    """Measure, and write microseconds per step of each arm and repeat: on the wall, and of processor time."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--what", choices=("bare", "logging", "defaults", "validation"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    torch.set_num_threads(1)
    if options.what == "validation":
        arms = validation_arms(with_peer=has_peer())
    else:
        logs, defaults = options.what != "bare", options.what == "defaults"
        arms = training_arms(logs=logs, defaults=defaults, with_peer=has_peer())
    arms["by hand again"] = arms["by hand"]  # shows how far apart two equal arms are: what is less than that is noise
    samples: dict[str, dict[str, list[float]]] = {"wall": {}, "cpu": {}}
    order = random.Random(0)
    for repeat in range(options.repeats + 1):
        for name in order.sample(sorted(arms), len(arms)):
            clock = Clock(WARMUP, WARMUP + options.steps)
            torch.manual_seed(0)
            arms[name](WARMUP + options.steps + 1, clock)
            let_go()
            if repeat:  # the first round only loads what the others find loaded
                samples["wall"].setdefault(name, []).append(1e6 * clock.seconds / options.steps)
                samples["cpu"].setdefault(name, []).append(1e6 * clock.cpu_seconds / options.steps)
    options.out.write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
