"""Tests of common trainings: schedulers, validation, a module used twice."""

from __future__ import annotations

from dstrat.testing.advice import fail
from dstrat.testing.reference import on_one_device, one_device
from dstrat.testing.skips import not_declared
from dstrat.testing.standard import standard
from dstrat.testing.strategy.training import Training

_SAMPLES = 64  # 8 batches
_FEW = 32  # samples


class Everyday(Training):
    """A few steps each, on two ranks."""

    @standard("processes", "training")
    def test_groups_of_parameters_have_the_learning_rates_of_their_scheduler(self, pair: int) -> None:
        options = {"net": "scheduled", "samples": _SAMPLES, "accumulate": 2}
        fitted = self._fit(pair, **options)
        expected = on_one_device(**options).rates
        for rank, found in enumerate(fitted):
            wrong = [
                batch for batch, pair_of in enumerate(zip(expected, found.rates, strict=True)) if _differ(*pair_of)
            ]
            if wrong:
                fail(
                    f"in batch {wrong[0]} the two groups of parameters have the learning rates {found.rates[wrong[0]]} "
                    f"in rank {rank} of {pair}, and {expected[wrong[0]]} on one device",
                    expected="the groups of the user's optimizer, and a scheduler that is stepped once for each "
                    "optimizer step.",
                    cure="never step schedulers: whoever runs the strategy does. Keep the groups where an engine "
                    "makes an optimizer of its own.",
                )
        if self.gives_losses_of_one_device:
            self._compare(fitted, **options)

    @standard("processes", "training")
    def test_a_validation_in_between_leaves_the_training_as_it_was(self, pair: int) -> None:
        without = self._losses(self._fit(pair, samples=_SAMPLES))
        losses = self._losses(self._fit(pair, samples=_SAMPLES, validate_every=2))
        wrong = [batch for batch, (one, other) in enumerate(zip(without, losses, strict=True)) if one != other]
        if wrong:
            fail(
                f"a training that validates after every second batch has other losses, first in batch {wrong[0]}: "
                f"{losses[wrong[0]]!r}, and {without[wrong[0]]!r} without validation",
                expected="the same bits: what an evaluation sets or changes is as before when it ends.",
                cure="leave evaluation_context with the weights, modes and gradients with which it was entered.",
            )

    @standard("processes", "training")
    def test_manual_optimization_trains_as_on_one_device(self, pair: int) -> None:
        self.need_losses_of_one_device()
        losses = self._losses(self._fit(pair, net="manual", samples=_SAMPLES))
        expected = on_one_device(net="manual", samples=_SAMPLES).losses
        self._check_close(losses, expected, f"{pair} ranks with automatic_optimization=False")

    @standard("processes", "training")
    def test_each_rank_keeps_its_own_random_numbers(self, pair: int) -> None:
        if self.readers(pair) == 1:
            not_declared(f"the {pair} ranks share each batch")
        drawn = [rank.drawn for rank in self._fit(pair, net="own", samples=8)]
        if len(set(drawn)) == 1:
            fail(
                f"{pair} ranks that were seeded differently draw the same random number after a step, {drawn[0]:.6f}",
                expected="each rank's own: with the same numbers dropout drops the same units for all data.",
                cure="never call torch.manual_seed; draw what all ranks share from a torch.Generator of your own.",
            )

    @standard("processes", "sessions")
    def test_a_trained_module_works_by_itself_and_can_be_trained_again(self, pair: int) -> None:
        from dstrat.testing.fits import Fit
        from dstrat.testing.used_again import use_again

        work = Fit(samples=_FEW, accelerator=self.accelerator)
        found = self.job(use_again, pair, subject=self.subject, work=work)
        again = [rank for rank in found if rank is not None]
        if not again:
            not_declared(f"{self.alias} leaves its parameters sharded")
        for rank, (problem, _) in enumerate(again):
            if problem:
                fail(
                    f"after fit the user's module, without the strategy, {problem} (rank {rank} of {pair})",
                    expected="teardown leaves a plain module: no hooks, and nothing that needs the other ranks.",
                    cure="keep the handles of hooks on modules and parameters, and remove them in teardown.",
                )
        if self.gives_losses_of_one_device:
            losses = [sum(of_batch) / pair for of_batch in zip(*(losses for _, losses in again), strict=True)]
            reference = self.reference_job(use_again, subject=one_device(), work=Fit(samples=_FEW))
            [(_, expected)] = filter(None, [reference])
            self._check_close(losses, expected, f"{pair} ranks that train a module a second time")

    @standard("processes", "sessions")
    def test_a_fit_after_one_that_broke_is_as_good(self, pair: int) -> None:
        from dstrat.testing.fits import Fit, fit_after_breaking

        work = Fit(samples=_FEW, accelerator=self.accelerator)
        fresh = self._fit(pair, samples=_FEW)
        for rank, (_, after) in enumerate(self.job(fit_after_breaking, pair, subject=self.subject, work=work)):
            if isinstance(after, str):
                fail(
                    f"after a fit in which every rank raised, the next one fails in rank {rank} of {pair}",
                    expected="on_exception and teardown leave the process ready for another fit, as in a notebook.",
                    cure="free in teardown what setup has taken; finish_training is not called when something breaks.",
                    details=after,
                )
            if after.losses != fresh[rank].losses:
                fail(
                    f"after a fit in which every rank raised, the next one has other losses, in rank {rank} of {pair}",
                    expected="the same as the first fit of a process: nothing of the broken run is left.",
                    details=f"alone {fresh[rank].losses}\nafter {after.losses}",
                )


def _differ(expected: list[float], found: list[float]) -> bool:
    return len(expected) != len(found) or any(
        abs(one - other) > 1e-9 for one, other in zip(expected, found, strict=True)
    )
