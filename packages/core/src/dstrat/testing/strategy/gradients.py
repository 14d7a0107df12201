"""Tests of gradients: averaged over ranks and accumulated batches, then clipped."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from dstrat.testing.ranks.fits import Fit, fit
from dstrat.testing.ranks.gradients import divided_fits, first_values, possible_steps, right_states, uneven_groups
from dstrat.testing.ranks.modules import GLOBAL_BATCH
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, not_declared, standard

if TYPE_CHECKING:
    from dstrat.testing.ranks.fits import FitResult

_CLOSE = 1e-4  # relative to the largest number
_CLIP = 0.2
_ACCUMULATE = 3

_WORKS = {
    "uneven groups": Fit(net="linear", samples=5 * GLOBAL_BATCH, accumulate=3, epochs=2),
    "uneven ranks": Fit(net="linear", samples=3 * GLOBAL_BATCH - 3, accumulate=2),
    "unknown length": Fit(net="streamed", accumulate=2, epochs=2),
}
_SKIPPED = {"skipped batches": Fit(net="skipping", samples=5 * GLOBAL_BATCH, accumulate=3)}
"""On several ranks a step without a loss is an error, which is the core's."""
_WEIGHTED = {"weights": Fit(net="weighted", samples=5 * GLOBAL_BATCH, accumulate=3)}


class Gradients(StrategyTests):
    """One step of SGD with a learning rate of 1 shows the gradient."""

    @standard("processes", "gradients")
    def test_gradients_are_averaged_over_the_ranks(self, world_size: int) -> None:
        self._check_step(world_size)

    @standard("processes", "gradients")
    def test_gradients_are_averaged_over_accumulated_batches(self, world_size: int) -> None:
        self._check_step(world_size, accumulate=_ACCUMULATE)

    @standard("processes", "gradients")
    def test_clipping_by_norm_comes_after_averaging(self, world_size: int) -> None:
        self._check_step(world_size, clip=_CLIP)

    @standard("processes", "gradients")
    def test_clipping_by_value_comes_after_averaging(self, world_size: int) -> None:
        self._check_step(world_size, clip=_CLIP, algorithm="value")

    @standard("processes", "gradients")
    def test_clipping_comes_after_accumulation(self, world_size: int) -> None:
        self._check_step(world_size, clip=_CLIP, accumulate=_ACCUMULATE)

    @standard("processes", "gradients")
    def test_the_last_group_of_an_epoch_may_have_fewer_batches(self, world_size: int) -> None:
        self.need_losses_of_one_device()
        work = self._work(batches=_ACCUMULATE + 1, accumulate=_ACCUMULATE)
        state = self._state_after(work, world_size)
        possible = self.reference_job(uneven_groups, work=work)
        nearest = _nearest(possible, state)
        if nearest != "right":
            fail(
                f"the last group of an epoch, of one batch where accumulate_grad_batches is {_ACCUMULATE}, was "
                f"{nearest or 'applied wrongly'}, with {world_size} ranks",
                expected="every group ends with an optimizer step, and is averaged over the batches that it has.",
                fix="step whenever optimizer_step is called, and leave the counting to whoever runs the strategy.",
                details="" if nearest else _compared(possible["right"], state),
            )

    @standard("processes", "gradients")
    def test_uneven_groups_are_the_mean_of_their_batches(self, world_size: int) -> None:
        self._check_division("uneven groups", "the last group of an epoch has 2 of 3 batches", world_size)

    @standard("processes", "gradients")
    def test_ranks_with_uneven_samples_take_the_same_steps(self, world_size: int) -> None:
        self._check_division("uneven ranks", "the samples do not divide into equal batches", world_size)

    @standard("processes", "gradients")
    def test_groups_of_a_loader_without_a_length_are_the_mean_of_their_batches(self, world_size: int) -> None:
        self._check_division(
            "unknown length", "each rank has another number of batches, which is not known before", world_size
        )

    @standard("processes", "gradients")
    def test_a_batch_without_a_loss_is_left_out_of_its_step(self) -> None:
        if 1 not in self.world_sizes:
            not_declared(f"{type(self).__name__} declares world_sizes = {self.world_sizes}, without 1")
        self._check_division("skipped batches", "the second batch has no loss", 1)

    @standard("processes", "gradients")
    def test_batches_count_by_their_weights(self, world_size: int) -> None:
        self.need_processes(world_size)
        if not self.subject.make().weighs_losses:
            not_declared(f"{self.alias} declares that it cannot weigh losses (weighs_losses)")
        self._check_division("weights", "losses have weights", world_size)

    def _check_division(self, name: str, division: str, world_size: int) -> None:
        __tracebackhide__ = True
        self.need_losses_of_one_device()
        if self.needs_even_batches:
            not_declared(f"{self.alias} declares needs_even_batches = {self.needs_even_batches!r}")
        works = next(works for works in (_WORKS, _SKIPPED, _WEIGHTED) if name in works)
        works = {key: replace(work, optimizer="sgd", accelerator=self.accelerator) for key, work in works.items()}
        # All trainings in one job, and all references in another: each costs less than the start of a job.
        ranks = self.shared_job(divided_fits, world_size, subject=self.subject, works=works)
        fitted: list[FitResult] = [fits[name] for fits in ranks]
        seen = {key: [fits[key].seen for fits in ranks] for key in works}
        right = self.reference_job(right_states, works=works, seen=seen)[name]
        actual = [value for values in fitted[0].state.values() for value in values]
        largest = max(map(abs, right.values))
        difference = max(abs(one - other) for one, other in zip(right.values, actual, strict=True)) / largest
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

    def _check_step(self, world_size: int, *, accumulate: int = 1, **clipping: object) -> None:
        __tracebackhide__ = True
        self.need_losses_of_one_device()
        work = self._work(batches=accumulate, accumulate=accumulate, **clipping)
        state = self._state_after(work, world_size)
        first = [value for values in self.reference_job(first_values, net="linear").values() for value in values]
        change = [after - before for after, before in zip(state, first, strict=True)]  # the negative gradient
        possible = self.reference_job(possible_steps, work=work, readers=self.readers(world_size))
        nearest = _nearest(possible, change)
        if nearest != "right":
            fail(
                f"with {world_size} ranks{_describe_options(work)} the gradient that the optimizer applied was "
                f"{nearest or 'neither the right one nor one of the usual mistakes'}",
                expected=f"the mean over all ranks{' and all accumulated batches' if accumulate > 1 else ''}"
                f"{', and then clipped' if clipping else ''}.",
                details="" if nearest else _compared(possible["right"], change),
            )

    def _work(self, *, batches: int, **options: object) -> Fit:
        return Fit(
            net="linear",
            optimizer="sgd",
            samples=batches * GLOBAL_BATCH,
            accelerator=self.accelerator,
            **options,  # type: ignore[arg-type]  # named fields of a fit
        )

    def _state_after(self, work: Fit, world_size: int) -> list[float]:
        __tracebackhide__ = True
        fitted = self.job(fit, world_size, subject=self.subject, work=work)
        return [value for values in fitted[0].state.values() for value in values]


def _nearest(possible: dict[str, list[float]], actual: list[float]) -> str | None:
    """Return the name of the list that matches; None where none does."""
    return next((name for name, values in possible.items() if _distance(values, actual) < _CLOSE), None)


def _distance(expected: list[float], actual: list[float]) -> float:
    largest = max(map(abs, expected)) or 1.0
    return max(abs(one - other) for one, other in zip(expected, actual, strict=True)) / largest


def _compared(expected: list[float], actual: list[float]) -> str:
    size = sum(map(abs, actual)) / (sum(map(abs, expected)) or 1.0)
    rows = [f"{one:12.6f}  {other:12.6f}" for one, other in list(zip(expected, actual, strict=True))[:5]]
    return "\n".join(
        ["    expected         found  (the first numbers)", *rows, f"its size is {size:.4f} of the right one"]
    )


def _describe_options(work: Fit) -> str:
    options = []
    if work.accumulate > 1:
        options.append(f"accumulate_grad_batches={work.accumulate}")
    if work.clip is not None:
        options.append(f"gradient_clip_val={work.clip} by {work.algorithm}")
    return f", {' and '.join(options)}," if options else ""
