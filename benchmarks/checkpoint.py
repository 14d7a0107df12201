"""Time, space and memory of checkpoints, over those of torch and torch.distributed.checkpoint for the same tensors."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from figure import Figure, medians_of, ratio_of
from job import run_job, script, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from settings import Settings

Samples = dict[str, list[float]]

_NOTE = "flushed to the disk; torch.save by one process"


def measure(settings: Settings) -> Iterator[Figure]:
    """Run one rank and two in turn."""
    mib = 256 if settings.quick else 1024
    alone: Samples = {}
    both: Samples = {}
    large: Samples = {}
    sharded: Samples = {}
    subjects = (
        (1, (), alone),
        (2, (), both),
        (1, ("--mib=2048", "--tensor-mib=256", "--loads-only"), large),
        (2, ("--loads-only",), sharded),
    )
    for _ in range(3 if settings.quick else 7):
        for processes, options, samples in subjects:
            for arm, value in _run(processes, mib, options).items():
                samples.setdefault(arm, []).append(value)
    yield from _of_one_rank(alone, mib)
    yield from _of_two_ranks(both, mib)
    yield from _loads(large, "8 tensors of 256 MiB", "torch.load")
    yield from _loads(
        sharded, f"{mib} MiB into shards of 2 ranks", "torch.distributed.checkpoint, which verifies nothing"
    )


def _run(processes: int, mib: int, options: Sequence[str]) -> Mapping[str, float]:
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:  # not /tmp, which may be in memory
        arguments = [f"--folder={folder}", f"--mib={mib}", *options]
        name = "checkpoint_rank.py"
        command = script(name, *arguments) if processes == 1 else torchrun(processes, name, *arguments)
        lines = run_job(command).output.splitlines()
    measured: Mapping[str, float] = json.loads(next(line for line in lines if line.startswith("{")))
    return measured


def _of_one_rank(samples: Samples, mib: int) -> Iterator[Figure]:
    yield _ratio(f"save {mib} MiB, over torch.save", samples, "portable save", "torch save", goal=0.6, note=_NOTE)
    yield from _loads(samples, f"{mib} MiB", "torch.load")
    yield _ratio(
        f"standing still in a save of {mib} MiB in the background, over the save",
        samples, "stand still", "portable save", goal=0.15,
        note=f"the first one also takes memory: {medians_of(samples)['first stand still']:.2f} s",
    )  # fmt: skip
    yield Figure(
        name="bytes on disk over bytes of tensors",
        value=samples["bytes"][0] / (mib * 1024 * 1024),
        goal=1.01,
        note=f"{samples['bytes'][0]:.0f} bytes",
    )
    yield _extra_memory("peak extra memory while one rank saves", samples["extra MiB"])


def _loads(samples: Samples, what: str, over: str) -> Iterator[Figure]:
    for place in ("disk", "cache"):
        name = f"load and verify {what} from the {place}, over {over}"
        yield _ratio(name, samples, f"portable load from {place}", f"torch load from {place}", goal=1.0)


def _of_two_ranks(samples: Samples, mib: int) -> Iterator[Figure]:
    name = f"save {mib} MiB sharded over 2 ranks, over torch.save"
    yield _ratio(name, samples, "portable save", "torch save", goal=0.35, note=_NOTE)
    yield _extra_memory("peak extra memory of a rank while 2 save", samples["extra MiB"])


def _ratio(name: str, samples: Samples, arm: str, over: str, *, goal: float, note: str = "") -> Figure:
    kept = {key: samples[key] for key in (arm, over)}
    return Figure(
        name=name, value=ratio_of(kept, arm, over=over), goal=goal, medians=medians_of(kept), samples=kept, note=note
    )


def _extra_memory(name: str, samples: Sequence[float]) -> Figure:
    return Figure(
        name=name,
        value=max(samples),
        unit="MiB",
        goal=64,
        samples={"extra": samples},
        arm_unit="MiB",
        note="four threads have a bucket of 8 MiB each",
    )
