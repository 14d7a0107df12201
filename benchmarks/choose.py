"""Predictions of ``dstrat choose`` beside measured steps and memory, on CPU processes of this machine.

``python benchmarks/choose.py`` measures the machine with 2 and with 4 ranks, and compares 24 cases: three models, two
numbers of ranks and four sizes of batches, each with several strategies and layouts of mesh, among them pipelines and
split layers.  It predicts the time of a step of each, and runs them in alternating rounds.  Then it compares the peak
of memory of larger models on 2 ranks.  Names of models after it run only these, ``--ranks 4`` one number of ranks, and
``--short`` one size of batches and one round.

It prints the shortest step of the rounds, for each case the rank correlation, the median error, and how much slower the
layout that ``dstrat choose`` recommends, with ``--strategy`` of each, is than the measured best; and a summary.  On a
machine that runs other programs the wall time of a step is mostly theirs; the time of the processors that its ranks use
is not, so that both are compared.  Stages of a pipeline wait for each other: the error of their processors' time is
that of a step without its bubble, and is not in the summary.
"""

from __future__ import annotations

import argparse
import os
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING

from choose_rank import LARGE_MODELS, MODELS, largest_memory, measure_machine, run

from dstrat.cli.choose.candidates import Candidate, Candidates, Workload
from dstrat.plugins.catalog import get_catalog
from dstrat.testing.ranks.jobs import run_in_team, run_job

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.cli.measure.machine import Machine

ROUNDS = 2
BATCHES = (1, 2, 4, 8)  # of a rank, in batches of the model
STRATEGIES = {
    2: (
        *("ddp", "fsdp", "mesh(dp_replicate=2)", "ddp_sharded", "bagua"),
        *("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
        *("mesh(pp=2, microbatches=4)", "mesh(tp=2)"),
    ),
    4: (
        *("ddp", "fsdp", "mesh(dp_replicate=2)", "mesh(dp_replicate=4)", "ddp_sharded"),
        *("deepspeed_stage_1", "deepspeed_stage_2", "deepspeed_stage_3"),
        *("mesh(pp=2, microbatches=4)", "mesh(tp=2)", "mesh(pp=2, tp=2, microbatches=4)"),
    ),
}
MEASURED = ("wall", "processor")
NEAR = 1.1
"""Time of the recommended layout over that of the measured best up to which a recommendation counts."""
MIB = 2**20


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model on some ranks with a batch, and the layouts that are compared.

    Attributes:
        model: Name of the model.
        ranks: Number of ranks.
        batch: Size of a rank's batch, in batches of the model.
    """

    model: str
    ranks: int
    batch: int

    def __str__(self) -> str:
        return f"{self.model} on {self.ranks} ranks, batch x {self.batch}"

    @property
    def strategies(self) -> Sequence[str]:
        """The layouts."""
        return STRATEGIES[self.ranks]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Predicted and measured times of a step in a case, by layout.

    The predictions are in the order of ``dstrat choose``, the layout that it recommends first: of those that take as
    long, this is the usual one.
    """

    predicted: dict[str, float]
    measured: dict[str, float]

    @property
    def rank_correlation(self) -> float:
        """Spearman's coefficient."""
        pairs = [(self.predicted[alias], self.measured[alias]) for alias in self.measured]
        # Equal times have their mean rank.
        ranks = [
            [sorted(times).index(time) + (times.count(time) - 1) / 2 for time in times]
            for times in zip(*pairs, strict=True)
        ]
        return statistics.correlation(*ranks)

    @property
    def errors(self) -> list[float]:
        """Differences of the predictions, as shares of what was measured."""
        return [abs(self.predicted[alias] / self.measured[alias] - 1) for alias in self.measured]

    @property
    def loss(self) -> float:
        """Measured time of the recommended layout over that of the measured best."""
        return self.measured[next(iter(self.predicted))] / min(self.measured.values())

    def __str__(self) -> str:
        return (
            f"rank correlation {self.rank_correlation:.2f}, median error {statistics.median(self.errors):.0%}, "
            f"{next(iter(self.predicted))} / measured best {self.loss:.2f}"
        )


def predict(machine: Machine, model: str, ranks: int, samples: int, aliases: Sequence[str]) -> dict[str, Candidate]:
    """Return the predictions by layout, in the order of ``dstrat choose``.

    Args:
        machine: The machine.
        model: Name of the model's function in choose_rank.
        ranks: Number of ranks.
        samples: Samples of a rank's batch.
        aliases: The layouts.
    """
    workload = Workload(
        model=f"choose_rank:{model}",
        machine=machine,
        devices=ranks,
        batch_size=ranks * samples,
        precisions=("32-true",),
        memory=1000 * machine.memory,
    )
    ranking = Candidates(get_catalog(), workload).rank(aliases)
    predicted = {one.strategy: one for one in ranking.candidates if one.strategy in aliases}
    # Layouts that are predicted to be the same are one candidate.
    missing = [alias for alias in aliases if alias not in predicted and alias in ranking.refused | ranking.unusable]
    if missing:
        raise SystemExit(f"{missing} are not compared: {ranking.refused | ranking.unusable}")
    for alias in aliases:
        if alias not in predicted:
            (predicted[alias],) = Candidates(get_catalog(), workload).rank([alias]).candidates
    return predicted


def compare(case: Case, machine: Machine, rounds: int) -> tuple[Comparison, Comparison]:
    """Measure a case, print its rows, and return the comparisons with wall time and with time of the processors."""
    _, samples = MODELS[case.model]()
    candidates = predict(machine, case.model, case.ranks, case.batch * len(samples), case.strategies)
    predicted = {alias: one.time.total for alias, one in candidates.items()}
    times: dict[str, list[tuple[float, float]]] = {alias: [] for alias in case.strategies}
    for _ in range(rounds):
        for alias in case.strategies:
            batch = case.batch * candidates[alias].communication.ranks_per_batch
            ranks = run_in_team(run, case.ranks, alias=alias, model=case.model, batch=batch)
            times[alias].append((max(wall for wall, _ in ranks), max(processor for _, processor in ranks)))
    turns = max(1.0, case.ranks / len(os.sched_getaffinity(0)))  # ranks that are more than processors
    wall, processor = (
        {alias: factor * min(one[column] for one in times[alias]) for alias in case.strategies}
        for column, factor in enumerate((1.0, turns))
    )
    # A stage that waits for another one takes no time of the processor.
    busy = {alias: one.time.total - one.time.idle for alias, one in candidates.items()}
    working = [alias for alias, one in candidates.items() if not one.time.idle]
    comparisons = (
        Comparison(predicted=predicted, measured=wall),
        Comparison(
            predicted={alias: predicted[alias] for alias in working},
            measured={alias: processor[alias] for alias in working},
        ),
    )
    print(f"\n{f'{case}, ms':<40}{'predicted':>10}{'wall':>10}{'error':>8}{'processor':>12}{'error':>8}")
    for alias in case.strategies:
        errors = predicted[alias] / wall[alias] - 1, busy[alias] / processor[alias] - 1
        print(
            f"{alias:<40}{1000 * predicted[alias]:>10.1f}{1000 * wall[alias]:>10.1f}{errors[0]:>+8.0%}"
            f"{1000 * processor[alias]:>12.1f}{errors[1]:>+8.0%}"
        )
    for name, comparison in zip(MEASURED, comparisons, strict=True):
        print(f"{name}: {comparison}", flush=True)
    return comparisons


def compare_memory(models: Sequence[str], machine: Machine) -> list[float]:
    """Measure the peak of each strategy on two ranks, print it beside the prediction, and return the errors."""
    print(f"\n{'memory of a rank, MiB':<40}{'predicted':>10}{'measured':>10}{'error':>8}")
    errors = []
    for model in models:
        _, samples = LARGE_MODELS[model]()
        for alias, one in predict(machine, model, 2, len(samples), STRATEGIES[2]).items():
            batch = one.communication.ranks_per_batch
            measured = max(run_job(largest_memory, 2, seconds=120, alias=alias, model=model, batch=batch))
            errors.append(one.peak / measured - 1)
            sizes = f"{one.peak / MIB:>10.0f}{measured / MIB:>10.0f}{errors[-1]:>+8.1%}"
            print(f"{f'{model}, {alias}':<40}{sizes}", flush=True)
    return [abs(error) for error in errors]


def main() -> None:
    """Measure the machine, compare the cases, and print the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=", ".join(MODELS))
    parser.add_argument("--ranks", type=int, choices=STRATEGIES, help="one number of ranks")
    parser.add_argument("--short", action="store_true", help="one size of batches and one round")
    arguments = parser.parse_args()
    unknown = set(arguments.models) - MODELS.keys()
    if unknown:
        parser.error(f"there is no model {', '.join(sorted(unknown))}: choose from {', '.join(MODELS)}")
    batches, rounds = (BATCHES[:1], 1) if arguments.short else (BATCHES, ROUNDS)
    comparisons: list[tuple[Comparison, Comparison]] = []
    machines: dict[int, Machine] = {}
    for ranks in [arguments.ranks] if arguments.ranks else STRATEGIES:
        machines[ranks] = machine = run_in_team(measure_machine, ranks)[0]
        rates = f"{machine.flops['float32'] / 1e9:.1f} GFLOP/s, copy {machine.memory_bandwidth / 1e9:.2f} GB/s"
        print(f"\n{ranks} ranks: matrix product {rates}", flush=True)
        cases = [
            Case(model=model, ranks=ranks, batch=batch) for model in arguments.models or MODELS for batch in batches
        ]
        comparisons += [compare(case, machine, rounds) for case in cases]
    large = [name for name in LARGE_MODELS if name.removeprefix("large_") in (arguments.models or MODELS)]
    memory = compare_memory(large, machines[2]) if large and 2 in machines else []
    print(f"\n{len(comparisons)} cases, {sum(len(one.errors) for one, _ in comparisons)} layouts")
    for name, of_cases in zip(MEASURED, zip(*comparisons, strict=True), strict=True):
        summarize(name, of_cases)
    if memory:
        shown = f"median {statistics.median(memory):.1%}, largest {max(memory):.1%} (goal 5%)"
        print(f"memory of a rank: error {shown}, {sum(error <= 0.05 for error in memory)} of {len(memory)} within 5%")


def summarize(name: str, comparisons: Sequence[Comparison]) -> None:
    """Print the comparisons of all cases with one kind of measured times."""
    correlations = [one.rank_correlation for one in comparisons]
    times = [error for one in comparisons for error in one.errors]
    near = sum(one.loss <= NEAR for one in comparisons)
    print(f"\n{name} time of a step")
    print(f"rank correlation  median {statistics.median(correlations):.2f}, least {min(correlations):.2f}")
    print(f"error             median {statistics.median(times):.0%}, largest {max(times):.0%}")
    print(f"the recommended layout is within 10% of the measured best in {near} of {len(comparisons)} (goal 20 of 24)")


if __name__ == "__main__":
    main()
