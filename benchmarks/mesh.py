"""Pipelines: steps per second over the same layout by hand, and the parameters of a rank over its ideal share.

The parameters are measured for a module with ``reset_parameters``, and with transformers for models of its own.
"""

from __future__ import annotations

import importlib.util
import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from figure import Figure, medians_of, ratio_of
from job import run_job, torchrun

if TYPE_CHECKING:
    from collections.abc import Iterator

    from settings import Settings

LAYOUTS = {2: "stages", 4: "stages and shards"}
"""Names of the layouts, by the number of ranks: two stages, each of which the other ranks shard."""

MODELS = {
    "deep": "a module of 192 blocks",
    "new llama": "a Llama of 96 layers from its config",
    "loaded llama": "a Llama of 96 layers of from_pretrained",
}


def measure(settings: Settings) -> Iterator[Figure]:
    """Measure both layouts, and the parameters with stages and split layers."""
    for ranks, layout in LAYOUTS.items():
        measured = _run(ranks, "speeds", repeats=10 if settings.quick else 30)
        speeds = measured["wall"]
        again = ratio_of(speeds, "by hand again", over="by hand")
        of_processor, of_processor_again = (
            ratio_of(measured["processor"], arm, over="by hand") for arm in ("dstrat", "by hand again")
        )
        yield Figure(
            name=f"{layout} on {ranks} ranks, steps/s over by hand",
            value=ratio_of(speeds, "dstrat", over="by hand"),
            goal=0.97,
            better="larger",
            medians=medians_of(speeds),
            arm_unit="steps/s",
            samples=speeds,
            note=(
                f"a second arm by hand has {again:.3f}; by the processor time of rank 0, which other programs change "
                f"less, {of_processor:.3f} and {of_processor_again:.3f}"
            ),
        )
    for subject, name in MODELS.items():
        if subject != "deep" and importlib.util.find_spec("transformers") is None:
            continue
        held = _run(4, subject, repeats=1)
        for time in ("while made", "after"):
            yield Figure(
                name=f"pp=2, tp=2: parameters of a rank {time} over a quarter of all, {name}",
                value=held[time] / held["ideal"],
                goal=1.02,
                note="the largest of the four ranks; biases after split layers, and norms, are on each rank",
            )


def _run(ranks: int, subject: str, *, repeats: int) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        arguments = [f"--subject={subject}", f"--repeats={repeats}", f"--out={out}"]
        run_job(torchrun(ranks, "mesh_rank.py", *arguments), patience=900)
        return json.loads(out.read_text())
