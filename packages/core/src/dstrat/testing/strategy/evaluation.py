"""Tests of evaluation: each sample counts once, also with uneven data."""

from __future__ import annotations

from itertools import chain
from typing import Any

from dstrat.testing.ranks.fits import Fit, evaluate, one_device
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, standard

_SAMPLES = (13, 3)  # which no number of ranks divides; with 3, one of 4 ranks has none


class Evaluation(StrategyTests):
    """Validation, test and prediction of an untrained module."""

    @standard("processes", "evaluation")
    def test_validation_counts_each_sample_once(self, world_size: int) -> None:
        self._check_logged("validate", world_size)

    @standard("processes", "evaluation")
    def test_testing_counts_each_sample_once(self, world_size: int) -> None:
        self._check_logged("test", world_size)

    @standard("processes", "evaluation")
    def test_predictions_come_once_and_in_order(self, world_size: int) -> None:
        for samples in _SAMPLES:
            predicted = self._evaluate(world_size, samples)[0]["predict"][0]
            if predicted != list(range(samples)):
                fail(
                    f"predict of samples 0 to {samples - 1} on {world_size} ranks returned those of {predicted}",
                    expected="one prediction for each sample, in the order of the data, in every rank.",
                )

    def _check_logged(self, stage: str, world_size: int) -> None:
        __tracebackhide__ = True
        for samples in _SAMPLES:
            results = self._evaluate(world_size, samples)
            self._check_seen([rank[stage][1] for rank in results], stage, samples)
            expected = self.reference_job(evaluate, subject=one_device(), work=Fit(evaluated=samples))[stage][0]
            for rank, values in enumerate(results):
                logged = values[stage][0]
                if logged["samples"] != samples:
                    fail(
                        f"{stage} of {samples} samples on {world_size} ranks counted {logged['samples']:g} of them in "
                        f"rank {rank}",
                        expected="values that are logged with reduce_fx='sum' are summed over the ranks, each once.",
                    )
                if abs(logged["mean_loss"] - expected["mean_loss"]) > self.tolerance * expected["mean_loss"]:
                    fail(
                        f"{stage} of {samples} samples on {world_size} ranks gave a mean loss of "
                        f"{logged['mean_loss']:.7f} in rank {rank}, and one device gives {expected['mean_loss']:.7f}",
                        expected="the mean over samples: a rank that has fewer counts less.",
                    )

    def _check_seen(self, seen: list[list[list[int]]], stage: str, samples: int) -> None:
        __tracebackhide__ = True
        shards = [tuple(chain.from_iterable(batches)) for batches in seen]
        readers = self.collected("positions", len(seen))[0]["sampler"].get("num_replicas", 1)
        # Ranks that share a batch ran over the same samples, which count once.
        shared = shards if readers == len(seen) else list(dict.fromkeys(shards))
        used = sorted(chain.from_iterable(shared))
        if self.subject.make().evaluates_together:  # a rank without samples takes part in the steps of the others
            used = sorted(set(used))
        if used != list(range(samples)):
            fail(
                f"{stage} of samples 0 to {samples - 1} on {len(seen)} ranks ran over {used}",
                expected="each sample once, in one rank.",
                fix='distributed_sampler_kwargs must give each rank its own "rank" of "num_replicas".',
            )

    def _evaluate(self, world_size: int, samples: int) -> list[dict[str, Any]]:
        __tracebackhide__ = True
        work = Fit(evaluated=samples, accelerator=self.accelerator)
        self.need_processes(world_size)
        return self.shared_job(evaluate, world_size, subject=self.subject, work=work)
