"""Predictions of ``dstrat choose`` beside measured steps, on two CPU processes of this machine.

``python benchmarks/choose.py`` measures the machine, predicts the time of a step of three models with eight strategies,
and runs them in alternating rounds; names of models after it run only these.  It prints the median of the rounds, and
for each model the rank correlation, the median error, and how much slower the predicted best is than the measured one.
"""

from __future__ import annotations

import statistics
import sys
from typing import TYPE_CHECKING

from choose_rank import MODELS, RANKS, measure_machine, run

from dstrat.cli.choose.candidates import Candidates, Workload
from dstrat.plugins.catalog import get_catalog
from dstrat.testing.ranks.jobs import run_in_team

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.cli.measure.machine import Machine

ROUNDS = 2
STRATEGIES = (
    *("ddp", "fsdp", "mesh(dp_replicate=2)", "ddp_sharded", "bagua"),
    *("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
)


def predict(model: str, machine: Machine) -> dict[str, float]:
    """Return the predicted times of a step by strategy."""
    workload = Workload(
        model=f"choose_rank:{model}",
        machine=machine,
        devices=RANKS,
        batch_size=None,
        precision="32-true",
        memory=machine.memory,
    )
    predicted, candidates = {}, Candidates(get_catalog(), workload)
    for alias in STRATEGIES:
        ranking = candidates.rank([alias])
        if not ranking.candidates:
            raise SystemExit(f"{alias} is not compared: {ranking.refused | ranking.unusable}")
        predicted[alias] = ranking.candidates[0].time.total
    return predicted


def rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    """Return Spearman's coefficient."""
    ranks = [[sorted(values).index(value) for value in values] for values in (one, other)]
    return statistics.correlation(*ranks)


def compare(model: str, machine: Machine) -> None:
    """Print the rows of a model."""
    predicted = predict(model, machine)
    rounds: dict[str, list[tuple[float, float]]] = {alias: [] for alias in STRATEGIES}
    for _ in range(ROUNDS):
        for alias in STRATEGIES:
            ranks = run_in_team(run, RANKS, alias=alias, model=model)
            rounds[alias].append((max(wall for wall, _ in ranks), max(processor for _, processor in ranks)))
    columns = [
        {alias: statistics.median(times[column] for times in rounds[alias]) for alias in STRATEGIES}
        for column in (0, 1)
    ]
    print(f"\n{model + ', ms':<24}{'predicted':>12}{'wall':>12}{'error':>8}{'processor':>12}{'error':>8}")
    for alias in STRATEGIES:
        cells = [f"{1000 * one[alias]:>12.1f}{predicted[alias] / one[alias] - 1:>+8.0%}" for one in columns]
        print(f"{alias:<24}{1000 * predicted[alias]:>12.1f}{''.join(cells)}")
    for name, measured in zip(("wall", "processor"), columns, strict=True):
        print(f"{name} time: {summary(predicted, measured)}")


def summary(predicted: dict[str, float], measured: dict[str, float]) -> str:
    """Return how good the order and the values of predictions are."""
    best = min(predicted, key=predicted.__getitem__)
    correlation = rank_correlation([*predicted.values()], [*measured.values()])
    error = statistics.median(abs(predicted[alias] / measured[alias] - 1) for alias in measured)
    loss = measured[best] / min(measured.values())
    return f"rank correlation {correlation:.2f}, median error {error:.0%}, predicted best / measured best {loss:.2f}"


def main() -> None:
    """Measure the machine, and compare the models."""
    machine: Machine = run_in_team(measure_machine, RANKS)[0]
    print(
        f"matrix product {machine.flops['float32'] / 1e9:.1f} GFLOP/s, copy {machine.memory_bandwidth / 1e9:.2f} GB/s"
    )
    for model in sys.argv[1:] or MODELS:
        compare(model, machine)


if __name__ == "__main__":
    main()
