"""Tests of divisions: how data is divided into batches, groups and ranks changes no gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dstrat.testing.ranks.divisions import divided_fits, right_states
from dstrat.testing.ranks.fits import Fit
from dstrat.testing.ranks.modules import GLOBAL_BATCH
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, not_declared, standard

if TYPE_CHECKING:
    from dstrat.testing.ranks.fits import FitResult

_CLOSE = 1e-4  # relative to the largest number

_WORKS = {
    "uneven groups": Fit(samples=5 * GLOBAL_BATCH, accumulate=3, epochs=2),
    "uneven ranks": Fit(samples=3 * GLOBAL_BATCH - 3, accumulate=2),
    "unknown length": Fit(net="streamed", accumulate=2, epochs=2),
}
_SKIPPING = {"skipped batches": Fit(net="skipping", samples=5 * GLOBAL_BATCH, accumulate=3)}
"""On several ranks a step without a loss is an error, which is the core's."""


class Divisions(StrategyTests):
    """An optimizer step takes the mean of the batches of all ranks that are in it, however many these are."""

    @standard("processes", "divisions")
    def test_uneven_groups_are_the_mean_of_their_batches(self, world_size: int) -> None:
        self._check("uneven groups", "the last group of an epoch has 2 of 3 batches", world_size)

    @standard("processes", "divisions")
    def test_ranks_with_uneven_samples_take_the_same_steps(self, world_size: int) -> None:
        self._check("uneven ranks", "the samples do not divide into equal batches", world_size)

    @standard("processes", "divisions")
    def test_groups_of_a_loader_without_a_length_are_the_mean_of_their_batches(self, world_size: int) -> None:
        self._check("unknown length", "each rank has another number of batches, which is not known before", world_size)

    @standard("processes", "divisions")
    def test_a_batch_without_a_loss_is_left_out_of_its_step(self) -> None:
        if 1 not in self.world_sizes:
            not_declared(f"{type(self).__name__} declares world_sizes = {self.world_sizes}, without 1")
        self._check("skipped batches", "the second batch has no loss", 1)

    def _check(self, name: str, division: str, world_size: int) -> None:
        __tracebackhide__ = True
        self.need_losses_of_one_device()
        if self.needs_even_batches:
            not_declared(f"{self.alias} declares needs_even_batches = {self.needs_even_batches!r}")
        works = _SKIPPING if world_size == 1 and name in _SKIPPING else _WORKS
        works = {key: self._sgd(work) for key, work in works.items()}
        # All trainings in one job, and all references in another: each costs less than the start of a job.
        ranks = self.shared_job(divided_fits, world_size, subject=self.subject, works=works)
        fitted: list[FitResult] = [fits[name] for fits in ranks]
        seen = {key: [fits[key].seen for fits in ranks] for key in works}
        right = self.reference_job(right_states, works=works, seen=seen)[name]
        found = [value for values in fitted[0].state.values() for value in values]
        largest = max(map(abs, right.values))
        difference = max(abs(one - other) for one, other in zip(right.values, found, strict=True)) / largest
        steps = {rank.steps for rank in fitted}
        if difference > _CLOSE or steps != {right.steps}:
            fail(
                f"with {world_size} ranks and accumulate_grad_batches={works[name].accumulate}, where {division}, the "
                f"parameters differ by {difference:.1e} from those of the right steps",
                expected="an optimizer step takes the mean of the gradients of all batches, of all ranks, that have "
                "come since the last step.",
                fix="step whenever optimizer_step is called, average over ranks once, and keep no count of batches.",
                details=f"optimizer steps: expected {right.steps}, found {sorted(steps)}\n"
                f"batches of the first rank: {[len(batch) for batch in fitted[0].seen]} samples",
            )

    def _sgd(self, work: Fit) -> Fit:
        net = "linear" if work.net == "plain" else work.net
        return replace(work, net=net, optimizer="sgd", accelerator=self.accelerator)
