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
    rounds: dict[str, list[float]] = {alias: [] for alias in STRATEGIES}
    for _ in range(ROUNDS):
        for alias in STRATEGIES:
            rounds[alias].append(max(run_in_team(run, RANKS, alias=alias, model=model)))
    measured = {alias: statistics.median(times) for alias, times in rounds.items()}
    print(f"\n{model:<24}{'predicted, ms':>14}{'measured, ms':>14}{'error':>8}   rounds, ms")
    errors = []
    for alias in STRATEGIES:
        errors.append(predicted[alias] / measured[alias] - 1)
        spread = " ".join(f"{1000 * one:.0f}" for one in rounds[alias])
        print(
            f"{alias:<24}{1000 * predicted[alias]:>14.1f}{1000 * measured[alias]:>14.1f}{errors[-1]:>+8.0%}   {spread}"
        )
    best = min(STRATEGIES, key=predicted.__getitem__)
    print(
        f"rank correlation {rank_correlation([*predicted.values()], [*measured.values()]):.2f}, median error "
        f"{statistics.median(map(abs, errors)):.0%}; predicted best {best} takes "
        f"{measured[best] / min(measured.values()):.2f} times the measured best"
    )


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
