"""Sharded training: speed over ``fully_shard`` by hand, bytes over the share, losses over one device."""

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

KEEP_NUMBERS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "fsdp": ((2, 4), {}),
    "fsdp, SHARD_GRAD_OP": ((2, 4), {"sharding_strategy": "SHARD_GRAD_OP"}),
    "fsdp, NO_SHARD": ((2,), {"sharding_strategy": "NO_SHARD"}),
    "fsdp, two replicas": ((4,), {"device_mesh": [2, 2]}),
    "fsdp, cpu_offload": ((2, 4), {"cpu_offload": True}),
    "fsdp, backward_prefetch": ((2,), {"backward_prefetch": "BACKWARD_POST"}),
    "fsdp, activation_checkpointing": ((2,), {"checkpoints_blocks": True}),
    "fsdp, auto_wrap_policy": ((2,), {"auto_wrap_policy": 2000}),
    "fsdp, accumulation": ((2, 4), {"trainer": {"accumulate_grad_batches": 2}}),
    "fsdp, clipping": ((2, 4), {"trainer": {"gradient_clip_val": 0.1}}),
    "model_parallel, 2 x 2": ((4,), {"tensor_parallel_size": 2}),
    "model_parallel, 2 x 2, clipping": ((4,), {"tensor_parallel_size": 2, "trainer": {"gradient_clip_val": 0.1}}),
}
"""Strategies and options that change where numbers are, and not the numbers; with the numbers of ranks."""


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure speed, memory and losses."""
    for ranks in (2, 4):
        yield from _speed(ranks, repeats=3 if settings.quick else 15)
    for ranks in (2, 4):
        yield _held(f"fsdp on {ranks}", ranks, {})
    yield _held("fsdp on 4, two replicas", 4, {"device_mesh": [2, 2]})
    yield _building(4)
    yield _losses()


def _speed(ranks: int, *, repeats: int) -> Iterator[Figure]:
    samples = _run(ranks, "steps", f"--repeats={repeats}", "--steps=15")[0]
    speeds, computing = samples["steps/s"], samples["cpu"]
    yield Figure(
        name=f"fsdp on {ranks} ranks, steps/s over fully_shard by hand",
        value=ratio_of(speeds, "dstrat", over="by hand"),
        goal=0.98,
        better="larger",
        medians=medians_of(speeds),
        arm_unit="steps/s",
        samples=speeds,
        note=f"a second arm by hand has {ratio_of(speeds, 'by hand again', over='by hand'):.3f}",
    )
    yield Figure(
        name=f"fsdp on {ranks} ranks, computing per step over by hand",
        value=ratio_of(computing, "dstrat", over="by hand"),
        medians=medians_of(computing),
        arm_unit="ms",
        samples=computing,
        note=f"processor time of rank 0; a second arm by hand has "
        f"{ratio_of(computing, 'by hand again', over='by hand'):.3f}",
    )


def _held(name: str, ranks: int, options: dict[str, Any]) -> Figure:
    found = _run(ranks, "memory", options=options)
    mib = 1024 * 1024
    return Figure(
        name=f"{name}: bytes of parameters, gradients and optimizer of a rank over its share",
        value=max(rank["bytes"] / rank["share"] for rank in found),
        goal=1.05,
        medians={"share": found[0]["share"] / mib, "held": max(rank["bytes"] for rank in found) / mib},
        arm_unit="MiB",
        note=f"resident size grew by {max(rank['peak'] for rank in found) / mib:.0f} MiB at its peak",
    )


def _building(ranks: int) -> Figure:
    found = _run(ranks, "building")
    mib = 1024 * 1024
    return Figure(
        name=f"fsdp on {ranks} ranks, most that a rank holds while it builds, over its shard and one block",
        value=max(rank["most"] / rank["bound"] for rank in found),
        goal=1.05,
        medians={"most": max(rank["most"] for rank in found) / mib, "whole model": found[0]["whole"] / mib},
        arm_unit="MiB",
    )


def _losses() -> Figure:
    worst, where = 0.0, ""
    for name, (numbers, options) in KEEP_NUMBERS.items():
        expected = _run(1, "losses", options={"trainer": options.get("trainer", {})})[0]
        for ranks in numbers:
            found = _run(ranks, "losses", options=options)
            mean = [sum(losses) / ranks for losses in zip(*found, strict=True)]
            apart = max(abs(a - b) / abs(b) for a, b in zip(mean, expected, strict=True))
            if apart >= worst:
                worst, where = apart, f"{name} on {ranks}"
    count = sum(len(numbers) for numbers, _ in KEEP_NUMBERS.values())
    return Figure(
        name="sharded losses over 20 steps, over one device",
        value=worst,
        unit="relative",
        goal=1e-6,
        note=f"largest difference of {count} strategies, options and numbers of ranks: {where}",
    )


def _run(ranks: int, what: str, *arguments: str, options: dict[str, Any] | None = None) -> list[Any]:
    """Return what each rank has found."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found")
        given = [f"--what={what}", f"--options={json.dumps(options or {})}", f"--out={out}", *arguments]
        run_job(torchrun(ranks, "fsdp_rank.py", *given), patience=900)
        return [json.loads(Path(f"{out}.{rank}.json").read_text()) for rank in range(ranks)]
