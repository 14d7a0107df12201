"""Tests of the life cycle, in the order of the interface."""

from __future__ import annotations

from typing import Any

from dstrat.testing.ranks.own_loop import ends_without_beginning, life_cycle, losses_in_a_loop, reference_losses
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, standard

_ONCE = (
    "accelerator.setup",
    "accelerator.teardown",
    "precision_plugin.connect",
    "precision_plugin.teardown",
    "checkpoint_io.teardown",
)
_STEPS = 12


class LifeCycle(StrategyTests):
    """Connect, open, set up, step and end, in as few processes as there can be and without a Trainer."""

    @standard("basic", "life cycle")
    def test_each_part_is_set_up_and_ended_once(self) -> None:
        events = self._life(is_fitting=True)["events"]
        for name in _ONCE:
            if (count := events.count(name)) != 1:
                fail(
                    f"{name} was called {count} times from setup_environment to teardown",
                    expected="once.",
                    fix="call the same method of Strategy (super()) in the one that you override.",
                )

    @standard("basic", "life cycle")
    def test_the_order_of_calls_is_that_of_the_interface(self) -> None:
        events = self._life(is_fitting=True)["events"]
        order = [
            "| setup_environment",
            "accelerator.setup",
            "| setup",
            "precision_plugin.connect",
            "configure_optimizers",
            "| steps",
            "| teardown",
        ]
        positions = [events.index(name) if name in events else -1 for name in order]
        for (earlier, one), (later, other) in zip(
            zip(order, positions, strict=True), list(zip(order, positions, strict=True))[1:], strict=False
        ):
            if one > other or one < 0 or other < 0:
                fail(
                    f"{later.lstrip('| ')} did not come after {earlier.lstrip('| ')}",
                    expected="setup_environment makes the accelerator ready; setup lets the precision convert the "
                    "module, moves and wraps it, and creates the optimizers last.",
                    details="\n".join(events),
                )

    @standard("basic", "life cycle")
    def test_optimizers_are_of_the_parameters_that_train(self) -> None:
        observed = self._life(is_fitting=True)
        after = observed["after setup"]
        if after["optimizers"] != 1:
            fail(f"after setup of a training there are {after['optimizers']} optimizers, and the module has one")
        if after["optimized elsewhere"]:
            fail(
                f"{after['optimized elsewhere']} parameters of the optimizer are not those of the module after setup",
                fix="create the optimizers (super().setup_optimizers) after the module was moved and wrapped.",
            )
        if observed["error in steps"]:
            fail(f"in a hand-written loop {observed['error in steps']}")
        if not observed["has trained"]:
            fail("three optimizer steps in a hand-written loop left every parameter as it was")

    @standard("basic", "life cycle")
    def test_an_evaluation_makes_no_optimizers(self) -> None:
        observed = self._life(is_fitting=False)
        if "configure_optimizers" in observed["events"] or observed["after setup"]["optimizers"]:
            fail("setup created optimizers though trainer.is_fitting is False: an evaluation has no memory for them")

    @standard("basic", "life cycle")
    def test_setup_puts_the_module_on_the_device_and_keeps_it_the_users(self) -> None:
        after = self._life(is_fitting=True)["after setup"]
        if not after["module is the user's"]:
            fail("strategy.module is not the user's module after setup: the wrapped one belongs into strategy.model")
        offloaded, declared = after["bytes on the host"], after["declared bytes on the host"]
        if offloaded > declared:
            fail(
                f"after setup {offloaded} bytes of parameters are on the host, root_device is {after['root device']}, "
                f"and memory_layout declares {declared} bytes on the host",
                expected="the parameters are on root_device, but for those that the strategy offloads.",
                fix="move them in model_to_device, or return their bytes as the host of memory_layout.",
            )
        allowed = {after["root device"], *(["cpu"] if offloaded else [])}
        if not after["devices"] or {*after["devices"]} - allowed:
            fail(
                f"after setup the module is on {', '.join(after['devices'])}, and root_device is {after['root device']}"
            )

    @standard("basic", "life cycle")
    def test_teardown_leaves_nothing_open(self) -> None:
        after = self._life(is_fitting=True)["after teardown"]
        problems = [
            *(["the module is not on the CPU"] if after["devices"] not in ([], ["cpu"]) else []),
            *(["strategy.model is still wrapped"] if not after["model is the module"] else []),
            *(["optimizers are kept"] if after["optimizers"] or after["schedulers"] else []),
            *(["the process group is open"] if after["process group is open"] else []),
            *(
                [f"torch's default dtype is {after['default dtype']}"]
                if after["default dtype"] != "torch.float32"
                else []
            ),
            *(["torch computes no gradients"] if not after["gradients are on"] else []),
        ]
        if problems:
            fail(
                f"after teardown {', and '.join(problems)}",
                fix="call super().teardown() and close what setup_environment has opened.",
            )

    @standard("basic", "life cycle")
    def test_it_may_end_before_it_has_begun_and_twice(self) -> None:
        problems = self.job(ends_without_beginning, self.fewest, subject=self.subject, accelerator=self.accelerator)[0]
        if problems:
            fail(
                f"{problems[0]}: what really broke would be hidden",
                expected="on_exception and teardown work at any moment, also twice.",
            )

    @standard("processes", "life cycle")
    def test_a_hand_written_loop_trains_as_on_one_device(self, world_size: int) -> None:
        self.need_losses_of_one_device()
        losses = self.job(
            losses_in_a_loop, world_size, subject=self.subject, accelerator=self.accelerator, steps=_STEPS
        )[0]
        expected = self.reference_job(reference_losses, steps=_STEPS)
        for step, (one, other) in enumerate(zip(expected, losses, strict=True)):
            if abs(one - other) > self.tolerance * abs(one):
                fail(
                    f"in a hand-written loop on {world_size} ranks the loss of step {step} is {other:.7f}, and plain "
                    f"torch gives {one:.7f}",
                    expected="the strategy trains without the Trainer: it relies on TrainerLike and on nothing else.",
                )

    def _life(self, *, is_fitting: bool) -> dict[str, Any]:
        __tracebackhide__ = True
        arguments = {"subject": self.subject, "accelerator": self.accelerator, "is_fitting": is_fitting}
        observed: dict[str, Any] = self.shared_job(life_cycle, self.fewest, **arguments)[0]
        return observed
