"""The suite for layouts of strategies that divide more than the batch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import pytest

from dstrat.testing.ranks.fits import one_device
from dstrat.testing.ranks.jobs import run_in_team
from dstrat.testing.ranks.layouts import SAVED_AT, LayoutRecord, expected_draw, train_layouts
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, not_declared, standard

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

_BATCHES_OF_A_STEP = 2
_END_OF_MOVES = SAVED_AT + 2  # in the next epoch; losses of the second step show the optimizer's state of the first one


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """A layout of a strategy.

    Attributes:
        processes: Number of ranks.
        options: Constructor arguments of the strategy.
        share: The largest share of the parameters that a rank may hold.
    """

    processes: int
    options: Mapping[str, Any] = field(default_factory=dict)
    share: float = 1.0


class LayoutSuite(StrategyTests):
    """Standard tests of layouts, which prove that each of them computes what one device computes.

    ::

        class TestMyLayouts(LayoutSuite):
            alias = "my_strategy"
            layouts = {"stages": Layout(processes=2, options={"pp": 2}, share=0.6)}

    The module is :class:`~dstrat.testing.ranks.layouts.LayoutNet`, a language model with attention, a pipeline, and a
    loss with weights; ``configure_model`` of the test class splits its layers.  Each rank has other first values, of
    which those of the first rank count.  Buffers of its first and last layer change in training.  A training takes ten
    batches of two epochs, two for each step, with clipping, a learning rate that falls with each step, and SGD, whose
    losses show the factor of gradients.  One from a checkpoint of another layout ends before, after two steps.

    Attributes:
        layouts: The layouts, by the names of their cases.
    """

    settings = StrategyTests.settings | {"layouts"}
    layouts: ClassVar[Mapping[str, Layout]] = {}
    tolerance: ClassVar[float] = 1e-6

    _folder: ClassVar[Path]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Try each layout that the author declares."""
        super().pytest_generate_tests(metafunc)
        if "layout" in metafunc.fixturenames:
            if not metafunc.cls.layouts:
                raise pytest.Collector.CollectError(
                    f'{metafunc.cls.__name__} tests nothing yet: set layouts = {{"stages": Layout(processes=2, '
                    'options={"pp": 2})}, with options of the strategy'
                )
            metafunc.parametrize("layout", list(metafunc.cls.layouts))

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def _checkpoints(cls, tmp_path_factory: pytest.TempPathFactory) -> None:
        cls._folder = tmp_path_factory.mktemp("layouts")

    def need_processes(self, world_size: int) -> None:
        """Skip the test where the strategy runs in one process."""
        if world_size > 1 and not self.component.starts_processes:
            not_declared(f"{self.alias} runs in one process (starts_processes=False)")

    def _one_device(self) -> LayoutRecord:
        """Return the training on one device, which has saved a checkpoint."""
        ways = [{"save_to": str(self._folder / "one device")}]
        record: LayoutRecord = self.reference_job(train_layouts, subject=one_device(), ways=ways)[0]
        return record

    def _trained(self, layout: str) -> list[list[LayoutRecord]]:
        """Return the trainings of each rank: a whole one, a resumed one, and one from the checkpoint of one device."""
        self._one_device()
        declared, saved = self.layouts[layout], str(self._folder / layout)
        ways = [{"save_to": saved}, {"resume_from": saved}, self._move_from("one device")]
        subject = self.subject.with_options(**declared.options)
        return self.shared_job(train_layouts, declared.processes, subject=subject, ways=ways)

    def _move_from(self, layout: str) -> dict[str, Any]:
        """Return the way of a training that goes on from a checkpoint of another layout."""
        return {"resume_from": str(self._folder / layout), "stop_at": _END_OF_MOVES}

    @standard("processes", "training")
    def test_losses_are_those_of_one_device(self, layout: str) -> None:
        expected = self._one_device()
        for rank, (record, *_) in enumerate(self._trained(layout)):
            self._check(record.losses, expected.losses, f"{layout}: the losses of rank {rank}")
            self._check(record.validated, expected.validated, f"{layout}: the validations of rank {rank}")

    @standard("processes", "training")
    def test_gradient_norms_are_those_of_one_device(self, layout: str) -> None:
        expected = self._one_device().norms
        for rank, (record, *_) in enumerate(self._trained(layout)):
            if record.norms:
                self._check(record.norms, expected, f"{layout}: the norms of gradients in rank {rank}")

    @standard("processes", "training")
    def test_buffers_are_those_of_one_device(self, layout: str) -> None:
        expected = self._one_device().buffers
        for rank, (record, *_) in enumerate(self._trained(layout)):
            for name, values in record.buffers.items():
                self._check(values, expected[name], f"{layout}: the buffer {name!r} of rank {rank}")

    @standard("processes", "training")
    def test_steps_leave_random_numbers_alone(self, layout: str) -> None:
        for rank, (record, *_) in enumerate(self._trained(layout)):
            if record.drawn != expected_draw(rank):
                fail(
                    f"{layout}: rank {rank} was seeded before a step without dropout, and draws {record.drawn} after "
                    f"it instead of {expected_draw(rank)}",
                    expected="a step neither draws from torch's generator nor seeds it.",
                    fix="draw from a torch.Generator of your own.",
                )

    @standard("processes", "hardware")
    def test_a_rank_holds_no_more_than_its_share(self, layout: str) -> None:
        total = self._one_device().numel
        for rank, (record, *_) in enumerate(self._trained(layout)):
            if record.numel > self.layouts[layout].share * total:
                fail(
                    f"{layout}: rank {rank} holds {record.numel} of {total} elements of the parameters, and the layout "
                    f"declares share={self.layouts[layout].share}"
                )

    @standard("processes", "checkpoints")
    def test_resuming_equals_never_having_stopped_bit_for_bit(self, layout: str) -> None:
        self.need_determinism()
        for rank, (record, resumed, _) in enumerate(self._trained(layout)):
            pairs = {
                "losses": (_after_saving(record.losses), resumed.losses),
                "norms of gradients": (record.norms[SAVED_AT:], resumed.norms),
                "buffers": (record.buffers, resumed.buffers),
            }
            for subject, (through, values) in pairs.items():
                if values != through:
                    fail(
                        f"{layout}: a training that resumes in the middle of an epoch has other {subject} in rank "
                        f"{rank}",
                        expected="the same bits as without the stop.",
                        details=f"through {through}\nresumed {values}",
                    )

    @standard("processes", "moving")
    def test_a_checkpoint_of_one_device_goes_on_here(self, layout: str) -> None:
        for rank, (*_, moved) in enumerate(self._trained(layout)):
            self._check_moved(moved, f"{layout}: after a move from one device the losses of rank {rank}")

    @standard("processes", "moving")
    def test_a_checkpoint_of_the_previous_layout_goes_on_here(self, layout: str) -> None:
        layouts = list(self.layouts)
        previous, declared = layouts[layouts.index(layout) - 1], self.layouts[layout]
        if previous == layout:
            not_declared(f"{type(self).__name__} declares one layout")
        self._trained(previous)
        subject = self.subject.with_options(**declared.options)
        moved = self.job(train_layouts, declared.processes, subject=subject, ways=[self._move_from(previous)])
        for rank, [record] in enumerate(moved):
            self._check_moved(record, f"{layout}: after a move from {previous!r} the losses of rank {rank}")

    @standard("processes", "moving")
    def test_a_checkpoint_goes_on_on_one_device(self, layout: str) -> None:
        self._trained(layout)
        [[moved]] = run_in_team(train_layouts, 1, subject=one_device(), ways=[self._move_from(layout)])
        self._check_moved(moved, f"{layout}: after a move the losses")

    def _check_moved(self, moved: LayoutRecord, subject: str) -> None:
        __tracebackhide__ = True
        expected = self._one_device().losses[: _END_OF_MOVES * _BATCHES_OF_A_STEP]
        self._check(moved.losses, _after_saving(expected), subject)

    def _check(self, actual: Sequence[float], expected: Sequence[float], subject: str) -> None:
        __tracebackhide__ = True
        if actual != pytest.approx(expected, rel=self.tolerance, abs=0):
            fail(
                f"{subject} differ from those of one device",
                expected=f"a relative difference below {self.tolerance:g}.",
                details=f"one device {list(expected)}\nhere       {list(actual)}",
            )


def _after_saving(losses: Sequence[float]) -> list[float]:
    return list(losses[SAVED_AT * _BATCHES_OF_A_STEP :])
