"""Tests of repeated use in one interpreter, of listening sockets, of notebooks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dstrat.testing.advice import fail
from dstrat.testing.processes import can_look
from dstrat.testing.program import run_program
from dstrat.testing.reference import on_one_device
from dstrat.testing.skips import not_declared
from dstrat.testing.standard import standard
from dstrat.testing.strategy.failures import Failures

if TYPE_CHECKING:
    from pathlib import Path

_SAMPLES = 32


class Sessions(Failures):
    """Runs as users have them, beside the first fit of a script."""

    @standard("processes", "sessions")
    def test_a_second_fit_in_the_same_processes_equals_the_first(self, world_size: int) -> None:
        from dstrat.testing.fits import Fit, fit_twice

        work = Fit(samples=_SAMPLES, accelerator=self.accelerator)
        for rank, (first, second) in enumerate(self.job(fit_twice, world_size, subject=self.subject, work=work)):
            if isinstance(second, str):
                fail(
                    f"the second fit in one process failed in rank {rank} of {world_size}",
                    expected="teardown leaves the process as it was, so that a fit can follow.",
                    cure="keep nothing in globals or class attributes, and close what setup_environment opened.",
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
        from dstrat.testing.launching import launch

        self.need_processes(pair)
        outcomes = self.shared_job(
            launch,
            1,
            needs_new_ranks=True,
            subject=self.launched(),
            accelerator=self.accelerator,
            devices=pair,
            misdeed="nothing",
            times=2,
        )[0]
        for name, outcome in zip(("first", "second"), outcomes, strict=True):
            if outcome.error:
                fail(f"the {name} fit of two in one script failed", details=outcome.error)
            if outcome.steps != len(on_one_device(samples=64).losses):
                fail(f"after the {name} fit the Trainer has counted {outcome.steps} optimizer steps, not 8")
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
            seconds=self.seconds * 2,
            environ=self.environ,
        )
        if len(ranks) != pair:
            fail(
                f"a script with Trainer(strategy={self.alias!r}, devices={pair}) trained in {len(ranks)} processes",
                expected=f"one for each of {pair} devices.",
            )

    @standard("processes", "sessions")
    def test_it_listens_on_the_loopback_only(self, pair: int) -> None:
        from dstrat.testing.launching import sockets

        if not can_look():
            not_declared("this system has no /proc to look for sockets in")
        job = {"subject": self.subject, "accelerator": self.accelerator}
        for rank, found in enumerate(self.job(sockets, pair, needs_new_ranks=True, **job)):
            if found:
                fail(
                    f"rank {rank} of {pair} listens on {', '.join(found)}: any machine of the network can connect to "
                    "a job that runs on one",
                    expected="a job on one machine listens on 127.0.0.1 only.",
                    cure="open the process group with open_process_group, which takes the socket of the cluster "
                    "environment, and bind sockets of your own to 127.0.0.1.",
                )

    @standard("processes", "sessions")
    def test_at_a_prompt_it_behaves_as_its_record_says(self, pair: int) -> None:
        from dstrat.testing.launching import at_a_prompt

        self.need_processes(pair)
        job = {"subject": self.subject, "accelerator": self.accelerator, "devices": pair}
        outcome = self.job(at_a_prompt, 1, needs_new_ranks=True, **job)[0]
        if self.component.notebook_safe and outcome.error:
            fail(
                f"the record of {self.alias} says notebook_safe=True, and at a prompt it fails",
                cure='write notebook_safe=False, or start processes with start_method="fork".',
                details=outcome.error,
            )
        if not self.component.notebook_safe and not outcome.error:
            fail(
                f"the record of {self.alias} says notebook_safe=False, and it trains at a prompt all the same",
                cure="write notebook_safe=True, so that users of notebooks may choose it.",
            )
        if not self.component.notebook_safe and "notebook" not in outcome.error:
            fail(
                f"at a prompt {self.alias} fails without saying that it needs a script",
                expected="the plan refuses it: notebook_safe=False of the record says so before anything starts.",
                details=outcome.error,
            )
