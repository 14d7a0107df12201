"""Evaluation when processes have different numbers of batches, also by strategies whose steps communicate."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from dstrat.training.loops import stopping


@pytest.fixture
def communicating(averaging):
    """A strategy whose evaluation steps wait for the other processes, as those of a sharded module do."""

    class Communicating(averaging):
        evaluates_together = True

        def validation_step(self, *args, **kwargs):
            self.reduce(torch.ones(()))
            return super().validation_step(*args, **kwargs)

        def predict_step(self, *args, **kwargs):
            self.reduce(torch.ones(()))
            return super().predict_step(*args, **kwargs)

    return Communicating


@pytest.fixture
def metered_class(line_class):
    """A module that counts the samples that it sees in validation, by a metric object and by a logged value."""

    import torchmetrics

    class Metered(line_class):
        def __init__(self):
            super().__init__()
            self.seen = torchmetrics.SumMetric()

        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            self.seen(len(batch[0]))
            self.log("seen", self.seen)
            self.log("samples", float(len(batch[0])), reduce_fx="sum")

    return Metered


@pytest.mark.parametrize("count", [8, 20, 24])  # one batch for two ranks, three batches, as many for each
def test_each_sample_counts_once(quiet_trainer, make_line, metered_class, loader, communicating, count):
    module = make_line(metered_class)
    [alone] = quiet_trainer().validate(module, loader(count=count))
    trainer = quiet_trainer(strategy=communicating(), devices=2)
    [together] = trainer.validate(make_line(metered_class), loader(count=count))
    assert together["seen"] == together["samples"] == count
    assert together == pytest.approx(alone)


def test_predictions_come_once_and_in_order(quiet_trainer, line, loader, communicating):
    alone = quiet_trainer().predict(line, loader(count=20))
    together = quiet_trainer(strategy=communicating(), devices=2).predict(line, loader(count=20))
    torch.testing.assert_close(torch.cat(together), torch.cat(alone))


@pytest.mark.parametrize("seconds", [0.0, 0.5])
@pytest.mark.parametrize("waits", [True, False])
def test_iterables_of_unknown_length_end_together(
    quiet_trainer, line_class, averaging, communicating, seconds, waits, monkeypatch
):
    monkeypatch.setattr(stopping, "SECONDS_BETWEEN_VOTES", seconds)  # 0 lets the processes vote after every batch

    class Uneven(line_class):
        def val_dataloader(self):
            generator = torch.Generator().manual_seed(self.global_rank)
            return ([torch.randn(4, 8, generator=generator), torch.ones(4, 1)] for _ in range(1 + 3 * self.global_rank))

        def validation_step(self, batch, batch_idx):
            self.log("batches", 1.0, reduce_fx="sum")

    strategy = communicating() if waits else averaging()
    assert quiet_trainer(strategy=strategy, devices=2).validate(Uneven()) == [{"batches": 5.0}]


@pytest.mark.parametrize("count", [20, 36])  # three and five batches
@pytest.mark.parametrize("collective", ["of the module", "of torch"])
def test_steps_of_users_may_communicate_without_a_rank_that_waits_for_ever(
    quiet_trainer, metered_class, make_line, loader, averaging, collective, count
):
    class Gathering(metered_class):
        def validation_step(self, batch, batch_idx):
            super().validation_step(batch, batch_idx)
            if collective == "of the module":
                assert self.all_gather(batch[0].sum()).shape == (2,)
            else:
                torch.distributed.all_reduce(batch[0].sum())

    [logged] = quiet_trainer(strategy=averaging(timeout=timedelta(seconds=20)), devices=2).validate(
        make_line(Gathering), loader(count=count)
    )
    assert logged["seen"] == logged["samples"] == count


def test_steps_that_do_not_communicate_run_once_for_each_batch(quiet_trainer, line_class, make_line, loader, averaging):
    class Counting(line_class):
        def on_validation_epoch_start(self):
            self.count = 0

        def validation_step(self, batch, batch_idx):
            self.count += 1

        def on_validation_epoch_end(self):
            self.log("steps", float(self.count), reduce_fx="sum", sync_dist=True)

    trainer = quiet_trainer(strategy=averaging(), devices=2)
    assert trainer.validate(make_line(Counting), loader(count=20)) == [{"steps": 3.0}]


def test_padding_steps_get_their_batch_whole_and_their_own_defaults(quiet_trainer, line_class, make_line, averaging):
    class Popping(line_class):
        def val_dataloader(self):
            return torch.utils.data.DataLoader([{"x": torch.ones(2), "y": torch.ones(1)}] * 5, batch_size=2)

        def validation_step(self, batch, batch_idx, name="samples"):
            samples = batch.pop("y")
            self.log(name, float(len(samples)), reduce_fx="sum")
            self.all_gather(batch.pop("x").sum())

    trainer = quiet_trainer(strategy=averaging(timeout=timedelta(seconds=20)), devices=2)
    assert trainer.validate(make_line(Popping)) == [{"samples": 5.0}]


def test_steps_of_the_second_loader_may_communicate_where_those_of_the_first_do_not(
    quiet_trainer, line_class, make_line, averaging, monkeypatch
):
    monkeypatch.setattr(stopping, "SECONDS_BETWEEN_VOTES", 0.0)

    class Two(line_class):
        def val_dataloader(self):
            return [torch.utils.data.DataLoader(torch.ones(count, 2), batch_size=2) for count in (5, 6)]

        def validation_step(self, batch, batch_idx, dataloader_idx):
            if dataloader_idx == 1:
                self.all_gather(batch.sum())
            self.log("samples", float(len(batch)), reduce_fx="sum", add_dataloader_idx=True)

    trainer = quiet_trainer(strategy=averaging(timeout=timedelta(seconds=20)), devices=2)
    results = trainer.validate(make_line(Two))
    assert [sum(values.values()) for values in results] == [5.0, 6.0]
