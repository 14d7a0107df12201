"""Training with DeepSpeed: speed and start over DeepSpeed by hand, losses over one device."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figure import Figure, medians_of, ratio_of
from job import run_job, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

STAGES = (0, 1, 2, 3)
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"accumulate_grad_batches": 2},
    "clipping": {"gradient_clip_val": 0.1},
    "both": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
}


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure speed, start and losses on two ranks."""
    for stage in STAGES:
        yield from _speed(stage, repeats=3 if settings.quick else 15)
    for stage in (2, 3):
        yield _start(stage, repeats=2 if settings.quick else 10)
    yield _losses("", STAGES, {}, goal=1e-6)


def measure_offload() -> Figure:
    """Measure the losses with the optimizer on the CPU, which needs what DeepSpeed compiles for it."""
    return _losses(", offloaded", STAGES[1:], {"offload_optimizer": True}, goal=1e-5)


def _speed(stage: int, *, repeats: int) -> Iterator[Figure]:
    samples = _run(2, "steps", stage, f"--repeats={repeats}", "--steps=15")[0]
    again = ratio_of(samples["cpu"], "by hand again", over="by hand")
    yield Figure(
        name=f"DeepSpeed stage {stage} on 2 ranks, steps/s over by hand",
        value=ratio_of(samples["steps/s"], "dstrat", over="by hand"),
        goal=0.97,
        better="larger",
        medians=medians_of(samples["steps/s"]),
        arm_unit="steps/s",
        samples=samples["steps/s"],
        note=f"a second arm by hand has {ratio_of(samples['steps/s'], 'by hand again', over='by hand'):.3f}",
    )
    yield Figure(
        name=f"DeepSpeed stage {stage} on 2 ranks, computing per step over by hand",
        value=ratio_of(samples["cpu"], "dstrat", over="by hand"),
        medians=medians_of(samples["cpu"]),
        arm_unit="ms",
        samples=samples["cpu"],
        note=f"processor time of rank 0; a second arm by hand has {again:.3f}",
    )


def _start(stage: int, *, repeats: int) -> Figure:
    arms = ("by hand", "dstrat")
    samples: dict[str, list[float]] = {arm: [] for arm in arms}
    for repeat in range(repeats):
        for arm in arms if repeat % 2 else arms[::-1]:
            samples[arm].append(_run(2, "start", stage, f"--arm={arm}")[0]["cpu"])
    return Figure(
        name=f"DeepSpeed stage {stage} on 2 ranks, from the start to the first step over by hand",
        value=ratio_of(samples, "dstrat", over="by hand"),
        goal=1.05,
        medians=medians_of(samples),
        arm_unit="s",
        samples=samples,
        note="processor time of rank 0; both import dstrat",
    )


def _losses(name: str, stages: tuple[int, ...], options: dict[str, Any], *, goal: float) -> Figure:
    worst, where = 0.0, ""
    for way, trainer in WAYS.items():
        expected = _run(1, "losses", 0, options={"trainer": trainer})[0]
        for stage in stages:
            found = _run(2, "losses", stage, options={"trainer": trainer, **options})
            mean = [sum(losses) / 2 for losses in zip(*found, strict=True)]
            apart = max(abs(a - b) / abs(b) for a, b in zip(mean, expected, strict=True))
            if apart >= worst:
                worst, where = apart, f"stage {stage}, {way}"
    return Figure(
        name=f"DeepSpeed's losses over 20 steps{name}, over one device",
        value=worst,
        unit="relative",
        goal=goal,
        note=f"largest difference of {len(stages)} stages, with accumulation and clipping on and off: {where}",
    )


def _run(ranks: int, what: str, stage: int, *arguments: str, options: dict[str, Any] | None = None) -> list[Any]:
    """Return what each rank has found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found")
        given = [f"--what={what}", f"--stage={stage}", f"--options={json.dumps(options or {})}", f"--out={out}"]
        run_job(torchrun(ranks, "zero_rank.py", *given, *arguments), patience=900)
        return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(ranks)]
