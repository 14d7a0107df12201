"""Standard tests of resuming: on the same strategy, and on others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dstrat.testing.ranks.fits import (
    ONE_DEVICE,
    Fit,
    differences,
    fit,
    on_one_device,
    one_device,
    round_trip,
    saves,
    state_sizes,
)
from dstrat.testing.ranks.jobs import run_in_team
from dstrat.testing.strategy.base import StrategyTests
from dstrat.testing.suite import fail, not_declared, standard

if TYPE_CHECKING:
    from pathlib import Path

    from dstrat.testing.ranks.fits import FitResult

_SAMPLES = 64  # 8 steps
_SAVE_AT = 3
_LARGER = 1.5  # shares of a small net are uneven; gathered by two ranks, they are twice as large


class Checkpoints(StrategyTests):
    """Round trips, exact resume, and moving to and from one device."""

    @standard("processes", "checkpoints")
    def test_a_checkpoint_keeps_the_weights(self, world_size: int, checkpoint_format: str) -> None:
        self._check_round_trip("module", "weights", world_size, checkpoint_format)

    @standard("processes", "checkpoints")
    def test_a_checkpoint_keeps_the_optimizer_state(self, world_size: int, checkpoint_format: str) -> None:
        self._check_round_trip("optimizer", "optimizer's state", world_size, checkpoint_format)

    @standard("processes", "checkpoints")
    def test_the_state_for_a_checkpoint_is_no_larger_than_declared(self, pair: int) -> None:
        work = Fit(samples=24, accelerator=self.accelerator)
        for rank, (layout, sizes) in enumerate(self.job(state_sizes, pair, subject=self.subject, work=work)):
            if layout is None:
                not_declared(f"{self.alias} does not declare its memory (memory_layout returns None)")
            if layout.assumption:
                not_declared(f"{self.alias} declares its memory for some modules: {layout.assumption}")
            for name, size in sizes.items():
                expected = (
                    f"sharded_{name}_state returns what the rank has, without communication: DTensors, FlatShards, or "
                    "entries of this rank's parameters only."
                )
                if size.returned > _LARGER * size.declared:
                    fail(
                        f"rank {rank} of {pair} returns {size.returned} bytes as the state of the {name} for a "
                        f"checkpoint, and memory_layout declares {size.declared} on each rank: a save gathers what is "
                        "divided",
                        expected=expected,
                    )
                if size.declared < size.full and size.communicated > size.declared:
                    fail(
                        f"rank {rank} of {pair} communicates {size.communicated} bytes for the state of the {name} in "
                        f"a checkpoint, and memory_layout declares {size.declared} on each rank: a save sends what is "
                        "divided",
                        expected=expected,
                    )

    @standard("processes", "checkpoints")
    def test_a_checkpoint_is_written_once_and_every_rank_waits_for_it(self, pair: int) -> None:
        results = self.job(saves, pair, subject=self.subject, accelerator=self.accelerator)
        writers = [rank for rank, result in enumerate(results) if result["wrote"]]
        if writers != [0]:
            fail(
                f"a checkpoint was written by ranks {writers} of {pair}, where checkpoint_io.is_collective is False",
                expected="global rank 0 writes it, and nobody else: two writers spoil each other's file.",
                fix="ask is_global_zero before checkpoint_io.save_checkpoint, or leave all to Strategy's own.",
            )
        for rank, result in enumerate(results):
            if not result["is there"] or result["read"] != {"number": 5}:
                fail(
                    f"save_checkpoint returned in rank {rank} of {pair} before the checkpoint was there",
                    expected="every rank waits until it can be read.",
                    fix="end save_checkpoint with self.barrier(), in every rank.",
                )
            if not result["is gone"]:
                fail(f"remove_checkpoint left the checkpoint where it was, as rank {rank} of {pair} saw it")

    @standard("processes", "checkpoints")
    def test_resuming_equals_never_having_stopped_bit_for_bit(self, world_size: int, tmp_path: Path) -> None:
        self.need_determinism()
        # A net with dropout and shuffled data: random numbers of each rank and the position in an epoch must come back.
        uninterrupted = self._run(world_size, net="random", shuffle=True)
        at = str(tmp_path / "checkpoint")
        self._run(world_size, net="random", shuffle=True, save_to=at, save_at=_SAVE_AT, stop_at=_SAVE_AT)
        resumed = self._run(world_size, net="random", shuffle=True, resume_from=at)
        for rank, (one, other) in enumerate(zip(uninterrupted, resumed, strict=True)):
            self._check_same_data(one, other, rank)
            _check_same_losses(one, other, rank)
        if uninterrupted[0].state != resumed[0].state:
            fail(
                f"a training of {world_size} ranks that is resumed in the middle of an epoch ends with other weights "
                "than one that was never stopped, though its losses are the same",
                expected="bit for bit the same: what the last step changes is in the checkpoint too.",
            )

    @standard("processes", "checkpoints")
    def test_each_rank_goes_on_with_its_own_statistics_of_batch_norm(self, pair: int, tmp_path: Path) -> None:
        self.need_determinism()
        at = str(tmp_path / "checkpoint")
        uninterrupted = self._run(pair, net="normed", save_to=at, save_at=_SAVE_AT, validate_every=_SAVE_AT)
        resumed = self._run(pair, net="normed", resume_from=at, validate_every=_SAVE_AT)
        for rank, (one, other) in enumerate(zip(uninterrupted, resumed, strict=True)):
            _check_same_losses(one, other, rank)
            differing = [name for name, values in one.buffers.items() if other.buffers.get(name) != values]
            if differing:
                fail(
                    f"a resumed training is not the one that was never stopped: rank {rank} ends with other buffers: "
                    f"{', '.join(differing)}",
                    expected="each rank goes on with the statistics that it has gathered of its own data.",
                    fix="leave buffers alone when a training begins, or when a rank's state is loaded.",
                )
            expected = one.validated[-len(other.validated) :]
            if expected != other.validated:
                fail(
                    f"validations after a resume log {other.validated} in rank {rank}, and not {expected}",
                    expected="the same bits: each rank validates with its own statistics.",
                )

    @standard("processes", "moving")
    def test_a_checkpoint_of_one_device_goes_on_here(self, world_size: int, tmp_path: Path) -> None:
        self._check_move(ONE_DEVICE, 1, self.alias, world_size, tmp_path)

    @standard("processes", "moving")
    def test_a_checkpoint_goes_on_on_one_device(self, world_size: int, tmp_path: Path) -> None:
        self._check_move(self.alias, world_size, ONE_DEVICE, 1, tmp_path)

    @standard("processes", "moving")
    def test_a_checkpoint_goes_on_on_another_number_of_ranks(self, several: int, tmp_path: Path) -> None:
        other = next(size for size in (*reversed(self.world_sizes), 1) if size != several)
        self._check_move(self.alias, several, self.alias, other, tmp_path)

    def _check_round_trip(self, key: str, name: str, world_size: int, checkpoint_format: str) -> None:
        __tracebackhide__ = True
        work = Fit(samples=24, accelerator=self.accelerator, checkpoint_format=checkpoint_format)  # type: ignore[arg-type]
        self.need_processes(world_size)
        saved, loaded = self.shared_job(round_trip, world_size, subject=self.subject, work=work)[0]
        # Two empty states would be equal.
        if key == "optimizer" and not _has_momentum(saved[key]):
            fail(
                f"optimizer_state of {self.alias} has no state of any parameter after three steps of AdamW, so that "
                "a checkpoint loses it",
                expected="the whole state of the optimizer in rank 0, as optimizer.state_dict() has it.",
            )
        differing = differences({"": saved[key]}, {"": loaded[key]})
        if differing:
            fail(
                f"a checkpoint in the {checkpoint_format} format, saved and loaded by {world_size} ranks, does not "
                f"bring back the {name}: {len(differing)} entries differ, such as {differing[0].lstrip('.')}",
                expected="what load_module_state_dict and load_optimizer_state (or their sharded forms) load is what "
                "the methods that save have returned.",
            )

    def _check_same_data(self, one: FitResult, other: FitResult, rank: int) -> None:
        __tracebackhide__ = True
        if one.seen[_SAVE_AT:] != other.seen:
            fail(
                f"a resumed training reads other samples than one that was never stopped, in rank {rank}",
                details=f"expected {one.seen[_SAVE_AT:]}\nread     {other.seen}",
            )

    def _check_move(self, origin: str, saved_by: int, target: str, loaded_by: int, tmp_path: Path) -> None:
        __tracebackhide__ = True
        self.need_losses_of_one_device()
        at = str(tmp_path / "checkpoint")
        self._run(saved_by, origin, save_to=at, save_at=_SAVE_AT, stop_at=_SAVE_AT)
        moved = self._run(loaded_by, target, resume_from=at)[0]
        reference = on_one_device(samples=_SAMPLES)
        for name, values in reference.state.items():
            moved_values = moved.state.get(name)
            if moved_values is None:
                fail(
                    f"the module has no {name!r} after a checkpoint moved from {origin} to {target}: its names are "
                    f"{', '.join(moved.state)}",
                    expected="the names of the user's module, without prefixes of a wrapper.",
                )
            largest = max(abs(one - two) for one, two in zip(values, moved_values, strict=True))
            if largest > self.tolerance * 10:
                fail(
                    f"a run that {origin} began on {saved_by} and {target} resumed on {loaded_by} ends with "
                    f"other weights than one on one device: {name} differs by {largest:.1e}",
                    expected="the same to the precision of sums in another order: a checkpoint has the whole state, "
                    "under the names of the user's module.",
                )

    def _run(self, world_size: int, alias: str = "", **options: Any) -> list[FitResult]:
        __tracebackhide__ = True
        if alias == ONE_DEVICE:
            return run_in_team(fit, 1, subject=one_device(), work=Fit(samples=_SAMPLES, **options))
        work = Fit(samples=_SAMPLES, accelerator=self.accelerator, **options)
        return self.job(fit, world_size, subject=self.subject, work=work)


def _check_same_losses(one: FitResult, other: FitResult, rank: int) -> None:
    __tracebackhide__ = True
    pairs = list(zip(one.losses[_SAVE_AT:], other.losses, strict=True))
    wrong = [step for step, (expected, resumed) in enumerate(pairs) if expected != resumed]
    if not wrong:
        return
    expected, resumed = pairs[wrong[0]]
    begins = (
        "the first step after it already draws other random numbers (or has other weights): draw none in setup or in "
        "the first step"
    )
    later = (
        f"before that the losses are the same ({wrong[0]} after the checkpoint): add what is not saved to state_dict"
    )
    fail(
        f"a resumed training is not the one that was never stopped: in rank {rank} the loss of step "
        f"{_SAVE_AT + wrong[0]} is {resumed!r}, and would have been {expected!r}",
        expected="the same bits: weights, optimizer, random state and data position come back.",
        fix=f"{later if wrong[0] else begins}.",
    )


def _has_momentum(optimizers: Any) -> bool:
    return bool(optimizers) and all(isinstance(state, dict) and state.get("state") for state in optimizers)
