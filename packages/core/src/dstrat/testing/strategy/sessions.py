"""Standard tests of repeated use in one interpreter, listening sockets, notebooks, devices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.plugins.catalog import get_catalog
from dstrat.testing.ranks.fits import Fit, fit, fit_after_breaking, fit_twice, on_one_device, one_device, reuse
from dstrat.testing.ranks.launching import at_a_prompt, can_look, launch, run_program, sockets
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.strategy.failures import Failures
from dstrat.testing.strategy.training import Training
from dstrat.testing.suite import fail, not_declared, standard

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dstrat.plugins.offer import Offer
    from dstrat.testing.ranks.team import RankContext


_SAMPLES = 64  # 8 batches
_FEW = 32  # samples


class Sessions(Failures):
    """Runs as users have them, beside the first fit of a script."""

    @standard("processes", "sessions")
    def test_a_second_fit_in_the_same_processes_equals_the_first(self, world_size: int) -> None:
        self.need_determinism()
        work = Fit(samples=_FEW, accelerator=self.accelerator)
        for rank, (first, second) in enumerate(self.job(fit_twice, world_size, subject=self.subject, work=work)):
            if isinstance(second, str):
                fail(
                    f"the second fit in one process failed in rank {rank} of {world_size}",
                    expected="teardown leaves the process as it was, so that a fit can follow.",
                    fix="keep nothing in globals or class attributes, and close what setup_environment opened.",
                    details=second,
                )
            if first.losses != second.losses:
                fail(
                    f"the second fit in one process gave other losses than the first, in rank {rank} of {world_size}",
                    expected="the same: nothing of a run is left for the next.",
                    details=f"first  {first.losses}\nsecond {second.losses}",
                )

    @standard("processes", "sessions")
    def test_it_can_be_launched_twice(self, pair: int) -> None:
        self.need_processes(pair)
        outcomes = self.shared_job(
            launch,
            1,
            needs_new_ranks=True,
            subject=self.launched(),
            accelerator=self.accelerator,
            devices=pair,
            fault="nothing",
            times=2,
        )[0]
        for name, outcome in zip(("first", "second"), outcomes, strict=True):
            if outcome.error:
                fail(f"the {name} fit of two in one script failed", details=outcome.error)
            if outcome.steps != 8:
                fail(f"after the {name} fit the Trainer has counted {outcome.steps} optimizer steps, not 8")
            # Of a sharded module this process, which has no rank, cannot see whether it was trained.
            is_sharded = outcome.has_trained is None and not self.subject.replicates_state
            if not outcome.has_trained and not is_sharded:
                fail(f"after the {name} fit the user's module has the parameters that it had before")

    @standard("processes", "sessions")
    def test_its_processes_start_as_they_do_for_users(self, pair: int, tmp_path: Path) -> None:
        self.need_processes(pair)
        ranks = run_program(
            self.subject,
            tmp_path,
            devices=pair,
            accelerator=self.accelerator,
            seconds=self.seconds * 2,  # its processes import torch, which those of the kit have
            environ=self.environ,
        )
        if len(ranks) != pair:
            fail(
                f"a script with Trainer(strategy={self.alias!r}, devices={pair}) trained in {len(ranks)} processes",
                expected=f"one for each of {pair} devices.",
            )

    @standard("processes", "sessions")
    def test_it_listens_on_the_loopback_only(self, pair: int) -> None:
        if not can_look():
            not_declared("this system has no /proc to look for sockets in")
        job = {"subject": self.subject, "accelerator": self.accelerator}
        # New ranks, in which no other function can have left a socket.
        for rank, addresses in enumerate(self.job(sockets, pair, needs_new_ranks=True, **job)):
            if addresses:
                fail(
                    f"rank {rank} of {pair} listens on {', '.join(addresses)}: any machine of the network can connect "
                    "to a job that runs on one",
                    expected="a job on one machine listens on 127.0.0.1 only.",
                    fix="open the process group with open_process_group, which takes the socket of the cluster "
                    "environment, and bind sockets of your own to 127.0.0.1.",
                )

    @standard("processes", "sessions")
    def test_at_a_prompt_it_behaves_as_its_record_says(self, pair: int) -> None:
        self.need_processes(pair)
        job = {"subject": self.subject, "accelerator": self.accelerator, "devices": pair}
        # New ranks, as it replaces their __main__.
        outcome = self.job(at_a_prompt, 1, needs_new_ranks=True, **job)[0]
        if self.component.notebook_safe and outcome.error:
            fail(
                f"the record of {self.alias} says notebook_safe=True, and at a prompt it fails",
                fix='write notebook_safe=False, or start processes with start_method="fork".',
                details=outcome.error,
            )
        if not self.component.notebook_safe and not outcome.error:
            fail(
                f"the record of {self.alias} says notebook_safe=False, and it trains at a prompt all the same",
                fix="write notebook_safe=True, so that users of notebooks may choose it.",
            )
        if not self.component.notebook_safe and "notebook" not in outcome.error:
            fail(
                f"at a prompt {self.alias} fails without saying that it needs a script",
                expected="the plan refuses it: notebook_safe=False of the record says so before anything starts.",
                details=outcome.error,
            )


# Common scenarios: schedulers, validation, a module used twice


class Scenarios(Training):
    """A few steps each, on two ranks."""

    @standard("processes", "training")
    def test_groups_of_parameters_have_the_learning_rates_of_their_scheduler(self, pair: int) -> None:
        options = {"net": "scheduled", "samples": _SAMPLES, "accumulate": 2}
        fitted = self._fit(pair, **options)
        expected = on_one_device(**options).rates
        for rank, result in enumerate(fitted):
            wrong = [
                batch for batch, pair_of in enumerate(zip(expected, result.rates, strict=True)) if _differ(*pair_of)
            ]
            if wrong:
                fail(
                    f"in batch {wrong[0]} the two groups of parameters have the learning rates "
                    f"{result.rates[wrong[0]]} in rank {rank} of {pair}, and {expected[wrong[0]]} on one device",
                    expected="the groups of the user's optimizer, and a scheduler that is stepped once for each "
                    "optimizer step.",
                    fix="never step schedulers: whoever runs the strategy does. Keep the groups where an engine "
                    "makes an optimizer of its own.",
                )
        if self.gives_losses_of_one_device:
            self._compare(fitted, **options)

    @standard("processes", "training")
    def test_a_validation_in_between_leaves_the_training_as_it_was(self, pair: int) -> None:
        self.need_determinism()
        without = self._losses(self._fit(pair, samples=_SAMPLES))
        losses = self._losses(self._fit(pair, samples=_SAMPLES, validate_every=2))
        wrong = [batch for batch, (one, other) in enumerate(zip(without, losses, strict=True)) if one != other]
        if wrong:
            fail(
                f"a training that validates after every second batch has other losses, first in batch {wrong[0]}: "
                f"{losses[wrong[0]]!r}, and {without[wrong[0]]!r} without validation",
                expected="the same bits: what an evaluation sets or changes is as before when it ends.",
                fix="leave evaluation_context with the weights, modes and gradients with which it was entered.",
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
                fix="never call torch.manual_seed; draw what all ranks share from a torch.Generator of your own.",
            )

    @standard("processes", "sessions")
    def test_a_trained_module_works_by_itself_and_can_be_trained_again(self, pair: int) -> None:
        work = Fit(samples=_FEW, accelerator=self.accelerator)
        results = self.job(reuse, pair, subject=self.subject, work=work)
        again = [rank for rank in results if rank is not None]
        if not again:
            not_declared(f"{self.alias} leaves its parameters sharded")
        for rank, (problem, _) in enumerate(again):
            if problem:
                fail(
                    f"after fit the user's module, without the strategy, {problem} (rank {rank} of {pair})",
                    expected="teardown leaves a plain module: no hooks, and nothing that needs the other ranks.",
                    fix="keep the handles of hooks on modules and parameters, and remove them in teardown.",
                )
        if self.gives_losses_of_one_device:
            losses = [sum(of_batch) / pair for of_batch in zip(*(losses for _, losses in again), strict=True)]
            reference = self.reference_job(reuse, subject=one_device(), work=Fit(samples=_FEW))
            expected = reference[1] if reference is not None else []  # one device shards nothing
            self._check_close(losses, expected, f"{pair} ranks that train a module a second time")

    @standard("processes", "sessions")
    def test_a_fit_after_one_that_broke_is_as_good(self, pair: int) -> None:
        work = Fit(samples=_FEW, accelerator=self.accelerator)
        fresh = self._fit(pair, samples=_FEW)
        for rank, (_, after) in enumerate(self.job(fit_after_breaking, pair, subject=self.subject, work=work)):
            if isinstance(after, str):
                fail(
                    f"after a fit in which every rank raised, the next one fails in rank {rank} of {pair}",
                    expected="on_exception and teardown leave the process ready for another fit, as in a notebook.",
                    fix="free in teardown what setup has taken; finish_training is not called when something breaks.",
                    details=after,
                )
            if after.losses != fresh[rank].losses:
                fail(
                    f"after a fit in which every rank raised, the next one has other losses, in rank {rank} of {pair}",
                    expected="the same as the first fit of a process: nothing of the broken run is left.",
                    details=f"alone {fresh[rank].losses}\nafter {after.losses}",
                )


def _differ(expected: list[float], actual: list[float]) -> bool:
    return len(expected) != len(actual) or any(
        abs(one - other) > 1e-9 for one, other in zip(expected, actual, strict=True)
    )


# Training on this machine's hardware, compared with the CPU


_CPU = "cpu"
_MOST = 2  # processes
_TOLERANCE = 1e-3  # of losses in float32, whose products other hardware sums in another order


class Devices(StrategyTests):
    """Trainings on accelerators other than the processor."""

    @standard("device", "devices")
    def test_losses_on_other_hardware_are_those_of_the_processor(self) -> None:
        self.need_losses_of_one_device()
        names = [
            offer.component.alias
            for offer in get_catalog().offers("accelerator")
            if offer.component.alias != _CPU and self._may_run_on(offer)
        ]
        counts = self.shared_job(count_devices, 1, names=names)[0]
        sizes = {name: size for name, count in counts.items() if (size := self._largest_size(count))}
        if not sizes:
            those = ", ".join(names) or "the accelerators but the processor"
            not_declared(f"of {those} there are too few devices here")
        expected = on_one_device(samples=_SAMPLES).losses
        for name, world_size in sizes.items():
            fitted = self.job(fit, world_size, subject=self.subject, work=Fit(samples=_SAMPLES, accelerator=name))
            losses = [sum(losses) / len(losses) for losses in zip(*(rank.losses for rank in fitted), strict=True)]
            worst = max(abs(one - other) / one for one, other in zip(expected, losses, strict=True))
            if worst > _TOLERANCE:
                fail(
                    f"on {world_size} devices of {name} the losses differ from those of the processor by {worst:.1e}",
                    expected=f"a relative difference below {_TOLERANCE:g}.",
                )

    def _largest_size(self, devices: int) -> int:
        """Return the number of processes to try on so many devices; 0 where there is none."""
        most = min(devices, _MOST if self.component.starts_processes else 1)
        return max((size for size in self.world_sizes if size <= most), default=0)

    def _may_run_on(self, offer: Offer) -> bool:
        """Return whether an accelerator's record leaves it possible."""
        strategy, hardware = self.component, offer.component
        is_meant = not strategy.accelerators or bool({*offer.names, *hardware.groups} & {*strategy.accelerators})
        has_type = not strategy.device_types or hardware.device_type in (None, *strategy.device_types)
        can_communicate = not strategy.uses_torch_distributed or hardware.supports_torch_distributed is not False
        is_served = strategy.alias in hardware.strategies  # by another strategy
        return is_meant and has_type and can_communicate and not is_served


def count_devices(_rank_context: RankContext, names: Sequence[str]) -> dict[str, int]:
    """Return the number of devices of each available accelerator."""
    catalog = get_catalog()
    counts = {}
    for name in names:
        offer = catalog.find("accelerator", name)
        accelerator = catalog.load(offer)(**offer.component.options)
        if accelerator.is_available():
            counts[name] = accelerator.auto_device_count()
    return counts
