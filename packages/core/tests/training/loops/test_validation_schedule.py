"""After which batches of a fit validation runs."""

from __future__ import annotations

import itertools
import time

import pytest

from dstrat import Callback
from dstrat.errors import ConflictError, MisuseError, RequestError


@pytest.fixture
def validated_at(quiet_trainer, line, loader):
    """Fits with six batches per epoch, and returns after how many batches validation ran."""

    def run(**options):
        seen = []

        class Noting(Callback):
            def on_validation_start(self, trainer, module):
                seen.append(trainer.fit_loop.batches_seen)

        quiet_trainer(num_sanity_val_steps=0, callbacks=Noting(), **options).fit(line, loader(), loader())
        return seen

    return run


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, [6, 12]),
        ({"val_check_interval": 2}, [2, 4, 6, 8, 10, 12]),
        ({"val_check_interval": 4}, [4, 10]),
        ({"val_check_interval": 0.5}, [3, 6, 9, 12]),
        ({"val_check_interval": 1.0}, [6, 12]),
        ({"val_check_interval": 0.25, "limit_train_batches": 2}, [1, 2, 3, 4]),
        ({"check_val_every_n_epoch": 2}, [12]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 4}, [4, 8, 12]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 9}, [9]),
        ({"val_check_interval": "01:00:00"}, []),
        ({"limit_val_batches": 0}, []),
        ({"limit_val_batches": 0, "val_check_interval": 7}, []),
        ({"limit_train_batches": 0, "val_check_interval": 2}, []),
        ({"limit_train_batches": 0, "val_check_interval": 0.5}, []),
    ],
)
def test_validation_runs_where_the_schedule_says(validated_at, options, batches):
    assert validated_at(**options) == batches


def test_validation_by_the_clock(quiet_trainer, line_class, loader):
    times = []

    class Slow(line_class):
        def training_step(self, batch, batch_idx):
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

        def on_validation_start(self):
            times.append(time.monotonic())

    quiet_trainer(
        num_sanity_val_steps=0, max_epochs=5, val_check_interval={"milliseconds": 100}, limit_val_batches=1
    ).fit(Slow(), loader(), loader())
    assert 2 <= len(times) < 30  # of as many batches; how long these take is the machine's business
    assert all(later - earlier >= 0.1 for earlier, later in itertools.pairwise(times))


def test_ranks_validate_by_the_clock_together(quiet_trainer, line_class, loader, averaging, tmp_path):
    class Slow(line_class):
        def training_step(self, batch, batch_idx):
            time.sleep(0.02)
            return super().training_step(batch, batch_idx)

        def on_validation_start(self):
            with (tmp_path / f"rank{self.global_rank}").open("a") as file:
                file.write(f"{self.trainer.fit_loop.batches_seen} ")

    quiet_trainer(
        strategy=averaging(),
        devices=2,
        num_sanity_val_steps=0,
        max_epochs=6,
        val_check_interval={"milliseconds": 100},
        limit_val_batches=1,
    ).fit(Slow(), loader(4), loader(4))
    validated = {path.read_text() for path in tmp_path.glob("rank*")}
    assert len(list(tmp_path.glob("rank*"))) == 2
    assert len(validated) == 1


def test_an_interval_that_no_epoch_reaches_is_an_error(validated_at):
    with pytest.raises(MisuseError, match="val_check_interval=7 is more than the 6 training batches"):
        validated_at(val_check_interval=7)


class WithoutLength:
    """The batches of a loader, whose number is not known before."""

    def __init__(self, loader):
        self._loader = loader

    def __iter__(self):
        return iter(self._loader)


@pytest.mark.parametrize(("interval", "has_length"), [(7, True), (0.5, False)])
def test_an_interval_has_no_effect_without_validation(quiet_trainer, line, loader, interval, has_length):
    trainer = quiet_trainer(val_check_interval=interval)
    trainer.fit(line, loader() if has_length else WithoutLength(loader()))
    assert trainer.global_step == 12


@pytest.mark.parametrize("interval", [0, -1, 1.5, True, "soon", {"weeks": "two"}, "00:00:00"])
def test_an_interval_that_is_none_is_an_error(quiet_trainer, interval):
    with pytest.raises(RequestError, match="val_check_interval="):
        quiet_trainer(val_check_interval=interval)


def test_a_fraction_of_no_epoch_is_an_error(quiet_trainer):
    with pytest.raises(ConflictError, match="is a fraction of an epoch"):
        quiet_trainer(val_check_interval=0.5, check_val_every_n_epoch=None)


def test_gradients_are_freed_before_validation(quiet_trainer, line_class, loader):
    seen = []

    class Seeing(line_class):
        def on_validation_start(self):
            seen.append(self.layer.weight.grad is None)

    quiet_trainer(max_epochs=1, accumulate_grad_batches=4, val_check_interval=2).fit(Seeing(), loader(), loader())
    assert seen == [True, False, True, True]  # the sanity check; in the middle of a group; at the ends of groups


class Changing(Callback):
    """Sets an attribute of the Trainer when the second epoch begins, and notes where validation runs."""

    def __init__(self, name, value):
        self.name, self.value, self.seen = name, value, []

    def on_train_epoch_start(self, trainer, module):
        if trainer.current_epoch == 1:
            setattr(trainer, self.name, self.value)

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.seen.append((trainer.fit_loop.batches_seen, batch_idx))


@pytest.mark.parametrize(
    ("name", "value", "seen"),
    [
        ("limit_val_batches", 0, [(2, 0), (2, 1)]),
        ("limit_val_batches", 1, [(2, 0), (2, 1), (4, 0), (6, 0)]),
        ("check_val_every_n_epoch", 3, [(2, 0), (2, 1), (6, 0), (6, 1)]),
        ("val_check_interval", 1, [(2, 0), (2, 1), (3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1), (6, 0), (6, 1)]),
    ],
)
def test_a_change_of_its_settings_counts_from_the_epoch_on(quiet_trainer, line, loader, name, value, seen):
    callback = Changing(name, value)
    options = {"max_epochs": 3, "limit_train_batches": 2, "limit_val_batches": 2, "num_sanity_val_steps": 0}
    quiet_trainer(callbacks=callback, **options).fit(line, loader(), loader())
    assert callback.seen == seen


def test_a_change_of_the_limit_reaches_all_ranks(quiet_trainer, line, loader, averaging):
    options = {"max_epochs": 2, "limit_train_batches": 1, "num_sanity_val_steps": 0, "log_every_n_steps": 0}
    options |= {"devices": 2, "strategy": averaging(), "callbacks": Changing("limit_val_batches", 1)}
    trainer = quiet_trainer(**options)
    trainer.fit(line, loader(), loader(count=40))  # 3 batches of rank 0, 2 of rank 1
    assert trainer.current_epoch == 2
