"""Standard tests of a strategy's record."""

from __future__ import annotations

import pickle

from dstrat.testing.plugin import check_light, check_record
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, standard


class Records(StrategyTests):
    """The record and the class."""

    @standard("basic", "record")
    def test_its_plugin_is_light_to_import(self) -> None:
        check_light(self.offer)

    @standard("basic", "record")
    def test_its_record_is_complete_and_true(self) -> None:
        check_record(self.offer)

    @standard("basic", "record")
    def test_it_starts_processes_as_its_record_says(self) -> None:
        if self.component.starts_processes and max(self.world_sizes) == 1:
            fail(
                f"{type(self).__name__} declares world_sizes = {self.world_sizes}, and {self.alias} starts processes",
                fix="try at least two processes, or nothing is proven of what they do together.",
            )
        self.subject.make()  # raises where the record contradicts the class, as it would for users

    @standard("basic", "record")
    def test_its_notebook_fact_fits_its_start_method(self) -> None:
        method = self.subject.make().start_method
        if self.component.notebook_safe and method in ("popen", "spawn"):
            fail(
                f"the record of {self.alias} says notebook_safe=True, and start_method={method!r} needs a script",
                fix='write notebook_safe=False, or offer a variant with start_method="fork".',
            )

    @standard("basic", "record")
    def test_it_is_constructed_without_touching_anything(self) -> None:
        first, second = self.subject.make(), self.subject.make()
        shared = [
            name
            for name, value in vars(first).items()
            if isinstance(value, list | dict | set) and value is vars(second)[name] and name not in self.options
        ]
        if shared:
            fail(
                f"two instances of {type(first).__name__} share {', '.join(shared)}: a run would see what another left",
                fix="create it anew in __init__, never as a default argument or class attribute.",
            )

    @standard("basic", "record")
    def test_it_can_be_pickled(self) -> None:
        strategy = self.subject.make()
        try:
            pickle.loads(pickle.dumps(strategy))  # noqa: S301 - our own bytes
        except Exception as error:  # noqa: BLE001 - __reduce__ of any class may raise anything
            fail(
                f"{type(strategy).__name__} cannot be pickled ({type(error).__name__}: {error}), so that it cannot "
                "reach processes that are started with spawn or forkserver",
                fix="open what cannot travel in setup_environment or setup, not in __init__.",
            )
