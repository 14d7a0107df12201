"""Tests of training against one device: losses, samples, unusual modules."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING, Any

from dstrat.testing.ranks.fits import Fit, fit, on_one_device, try_fit
from dstrat.testing.ranks.gradients import with_local_statistics
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, not_declared, standard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dstrat.testing.ranks.fits import FitResult

_STEPS = 20
_FEW = 64  # samples
_CLIP = 0.5
_PRECISION_TOLERANCE = 0.05  # of losses of mixed and low precision


class Training(StrategyTests):
    """Twenty steps of AdamW through the Trainer."""

    @standard("processes", "training")
    def test_losses_are_those_of_one_device(self, world_size: int) -> None:
        self._check_losses(world_size)

    @standard("processes", "training")
    def test_losses_are_those_of_one_device_with_accumulation_and_clipping(self, world_size: int) -> None:
        self._check_losses(world_size, accumulate=2, clip=_CLIP)

    @standard("processes", "training")
    def test_a_module_with_tied_parameters_trains_as_on_one_device(self, pair: int) -> None:
        self._check_losses(pair, net="tied", samples=_FEW)

    @standard("processes", "training")
    def test_batch_norm_takes_the_statistics_of_each_ranks_own_batch(self, pair: int) -> None:
        self.need_losses_of_one_device()
        fitted = self._fit(pair, net="normed", samples=_FEW)
        work = Fit(net="normed", samples=_FEW)
        losses, statistics = self.reference_job(with_local_statistics, work=work, readers=self.readers(pair))
        saved = {name: values for name, values in fitted[0].state.items() if name in statistics}
        if not _close(self._losses(fitted), losses, self.tolerance):
            fail(
                f"the losses of {pair} ranks with a layer of batch norm differ from those of torch",
                expected="each rank normalizes what it reads, unless sync_batchnorm=True, and gradients are averaged.",
                details=_table(losses, self._losses(fitted)),
            )
        shown = [value + 1.0 for value in _values(saved)]  # a difference counts relative to the inputs, of about 1
        if not _close(shown, [value + 1.0 for value in _values(statistics)], self.tolerance):
            fail(
                "the statistics of a layer of batch norm are not those that rank 0 has gathered",
                expected="buffers are saved with the module, as they are in rank 0.",
                details=f"expected {statistics}\nfound    {saved}",
            )

    @standard("processes", "training")
    def test_a_module_with_frozen_parameters_trains_as_on_one_device(self, pair: int) -> None:
        self._check_losses(pair, net="frozen", samples=_FEW)

    @standard("processes", "training")
    def test_unused_parameters_are_left_alone_or_named_in_an_error(self, pair: int) -> None:
        work = Fit(net="unused", samples=_FEW, accelerator=self.accelerator)
        # The error may be that of any rank: in the others the connection breaks.
        tried = self.job(try_fit, pair, subject=self.subject, work=work)
        errors = [outcome for outcome in tried if isinstance(outcome, str)]
        if not errors:
            self._compare([outcome for outcome in tried if not isinstance(outcome, str)], net="unused", samples=_FEW)
        elif not any("never_used" in error for error in errors):
            fail(
                "a module with a layer that no step uses broke the training, and the error does not name it",
                expected="it trains as on one device, or an error names the parameters ('never_used.weight') and "
                "says what to do.",
                details=errors[0],
            )

    @standard("processes", "training")
    def test_each_sample_is_used_once_in_an_epoch(self, world_size: int) -> None:
        fitted = self._fit(world_size, shuffle=True, samples=_FEW)
        # Of readers, as ranks that share a batch use the same samples.
        used = self._of_readers(fitted, lambda rank: list(chain.from_iterable(rank.seen)))
        counts = {sample: used.count(sample) for sample in range(_FEW)}
        wrong = {sample: count for sample, count in counts.items() if count != 1}
        if wrong:
            twice = [sample for sample, count in wrong.items() if count > 1]
            never = [sample for sample, count in wrong.items() if count == 0]
            fail(
                f"in one epoch of {_FEW} samples on {world_size} ranks {len(twice)} samples were used more than once "
                f"and {len(never)} never",
                expected="each rank trains on its own part of the shuffled data.",
                fix='distributed_sampler_kwargs must give each rank its own "rank" of "num_replicas".',
            )

    @standard("processes", "training")
    def test_every_rank_has_the_same_parameters_at_the_end(self, several: int) -> None:
        self.need_losses_of_one_device()
        fitted = self._fit(several)
        self._need_full_modules(fitted)
        self._check_same(fitted, "at the end of a training")

    @standard("processes", "training")
    def test_every_rank_begins_with_the_parameters_of_rank_0(self, pair: int) -> None:
        self.need_losses_of_one_device()
        fitted = self._fit(pair, net="own", samples=8)
        expected = on_one_device(net="own", samples=8)
        if self._has_full_modules(fitted):
            self._check_same(fitted, "after ranks that had initialized the module differently trained one step")
        if not _close(_values(fitted[0].state), _values(expected.state), self.tolerance):
            fail(
                f"{pair} ranks that had initialized the module differently did not train from the values of rank 0",
                expected="setup gives every rank the parameters and buffers of rank 0.",
            )

    @standard("processes", "training")
    def test_the_user_gets_the_trained_module_back(self, world_size: int) -> None:
        first = self._fit(world_size)[0]
        self._need_full_modules([first])
        if _values(first.user_state) != _values(first.state):  # a net without buffers, which user_state lacks
            fail(
                "the parameters of the user's module after fit are not those at the end of training",
                expected="teardown leaves the trained module, unwrapped and on the CPU.",
            )

    @standard("processes", "training")
    def test_it_counts_optimizer_steps(self, world_size: int) -> None:
        steps = self._fit(world_size, accumulate=2, clip=_CLIP)[0].steps
        if steps != _STEPS // 2:
            fail(f"20 batches with accumulate_grad_batches=2 gave {steps} optimizer steps, not 10")

    @standard("optional", "precision")
    def test_it_trains_in_each_precision_that_it_declares(self, precision: str) -> None:
        world_size = 2 if self.component.starts_processes and 2 in self.world_sizes else 1
        losses = self._losses(self._fit(world_size, precision=precision, samples=_FEW))
        if self.gives_losses_of_one_device:
            who, expected = "one device", on_one_device(precision=precision, samples=_FEW).losses
        else:
            who, expected = "the same in float32", self._losses(self._fit(world_size, samples=_FEW))
        # Backends that keep the optimizer's state in float32 are nearer to a training in float32.
        exact = on_one_device(samples=_FEW).losses if self.gives_losses_of_one_device else expected
        if not any(_close(losses, reference, _PRECISION_TOLERANCE) for reference in (expected, exact)):
            fail(
                f"in precision {precision!r} the losses differ from those of {who}",
                expected=f"a relative difference below {_PRECISION_TOLERANCE}.",
                details=_table(expected, losses),
            )

    def _fit(self, world_size: int, **options: Any) -> list[FitResult]:
        __tracebackhide__ = True
        self.need_processes(world_size)
        return self.shared_job(fit, world_size, subject=self.subject, work=Fit(accelerator=self.accelerator, **options))

    def _check_losses(self, world_size: int, **options: Any) -> None:
        __tracebackhide__ = True
        self._compare(self._fit(world_size, **options), **options)

    def _compare(self, fitted: Sequence[FitResult], **options: Any) -> None:
        __tracebackhide__ = True
        self.need_losses_of_one_device()
        self._check_close(self._losses(fitted), on_one_device(**options).losses, f"{len(fitted)} ranks")

    def _check_close(self, losses: Sequence[float], expected: Sequence[float], subject: str) -> None:
        __tracebackhide__ = True
        if _close(losses, expected, self.tolerance):
            return
        first = next(
            step
            for step, (one, other) in enumerate(zip(expected, losses, strict=True))
            if not _close([one], [other], self.tolerance)
        )
        fail(
            f"the losses of {subject} differ from those of one device, first in batch {first}",
            expected=f"a relative difference below {self.tolerance:g}.",
            fix="a difference in batch 0 is in the data or the first values of parameters; a later one in the "
            "gradients or the optimizer, of which the tests of 'gradients' say more.",
            details=_table(expected, losses),
        )

    def _losses(self, fitted: Sequence[FitResult]) -> list[float]:
        """Return the loss of each global batch."""
        return [sum(losses) / len(losses) for losses in zip(*(rank.losses for rank in fitted), strict=True)]

    def _of_readers(self, fitted: Sequence[FitResult], value: Any) -> list[Any]:
        """Return the values of the ranks that read different data, in one list."""
        shards = [position["sampler"].get("rank") for position in self.collected("positions", len(fitted))]
        # Reversed, so that the first rank of those that share a batch stands for them.
        readers = {shard: rank for rank, shard in reversed(list(enumerate(shards))) if shard is not None}
        ranks = readers.values() if len(readers) == self.readers(len(fitted)) else range(len(fitted))
        return [item for rank in ranks for item in value(fitted[rank])]

    def _need_full_modules(self, fitted: Sequence[FitResult]) -> None:
        __tracebackhide__ = True
        if not self._has_full_modules(fitted):
            not_declared(f"{self.alias} leaves its parameters sharded (replicates_state=False)")

    def _has_full_modules(self, fitted: Sequence[FitResult]) -> bool:
        """Return whether ranks have the whole module afterwards: they must where they hold replicas, others may."""
        return self.subject.replicates_state or all(rank.user_state.keys() == fitted[0].state.keys() for rank in fitted)

    def _check_same(self, fitted: Sequence[FitResult], when: str) -> None:
        __tracebackhide__ = True
        for rank, other in enumerate(fitted):
            if _values(other.user_state) != _values(fitted[0].user_state):
                differing = [name for name, values in other.user_state.items() if values != fitted[0].user_state[name]]
                fail(
                    f"rank {rank} of {len(fitted)} has other parameters than rank 0 {when}: {', '.join(differing[:4])}",
                    expected="ranks that hold replicas apply the same gradients to the same values.",
                )


def _values(state: dict[str, list[float]]) -> list[float]:
    return [value for values in state.values() for value in values]


def _close(one: Sequence[float], other: Sequence[float], tolerance: float) -> bool:
    return len(one) == len(other) and all(
        abs(first - second) <= tolerance * max(abs(first), abs(second), 1e-6)
        for first, second in zip(one, other, strict=True)
    )


def _table(expected: Sequence[float], actual: Sequence[float]) -> str:
    rows = [
        f"{step:5d} {one:12.7f} {other:12.7f} {abs(one - other) / (abs(one) or 1.0):11.1e}"
        for step, (one, other) in enumerate(zip(expected, actual, strict=False))
    ]
    return "\n".join(["batch   one device        found  difference", *rows[:6], *(["  ..."] if len(rows) > 6 else [])])
