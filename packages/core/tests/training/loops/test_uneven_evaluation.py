"""Evaluation when processes have different numbers of batches, also by strategies whose steps communicate."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch

from dstrat.errors import RankFailedError
from dstrat.training.loops import stopping
from dstrat.training.loops.evaluation_loop import pad_to_longest


@pytest.fixture
def communicating(averaging):
    """A strategy whose evaluation steps wait for the other processes, as those of a sharded module do."""

    class Communicating(averaging):
        evaluates_together = True

        def validation_step(self, *args, **kwargs):
            self.reduce(self.from_host(torch.ones(())))
            return super().validation_step(*args, **kwargs)

        def predict_step(self, *args, **kwargs):
            self.reduce(self.from_host(torch.ones(())))
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


# Ranks without any batch


def test_a_step_that_would_wait_for_a_rank_without_batches_is_an_error(
    quiet_trainer, line_class, make_line, loader, averaging
):
    class Gathering(line_class):
        def validation_step(self, batch, batch_idx):
            self.all_gather(batch[0])

    trainer = quiet_trainer(strategy=averaging(timeout=timedelta(seconds=20)), devices=2)
    message = "validation_step communicates on rank 0 of 2, and another rank has no batch"
    with pytest.raises(RankFailedError, match=message):
        trainer.validate(make_line(Gathering), loader(count=1))


def test_a_stream_without_a_batch_for_one_rank_is_an_error_where_steps_communicate(
    quiet_trainer, line_class, communicating
):
    class Streamed(line_class):
        def val_dataloader(self):
            return ([torch.ones(4, 8), torch.ones(4, 1)] for _ in range(1 - self.global_rank))

    with pytest.raises(RankFailedError, match="gave no batch on rank 1 of 2, and each step of Communicating"):
        quiet_trainer(strategy=communicating(), devices=2).validate(Streamed())


# Fewer batches than ranks


@pytest.fixture
def measured_class(line_class):
    """A module whose metrics begin with integers and with zeros, and which logs what a hook computes."""
    import torchmetrics

    class Sums(torchmetrics.Metric):
        def __init__(self):
            super().__init__()
            self.add_state("sum", default=torch.tensor(0), dist_reduce_fx="sum")
            self.add_state("count", default=torch.tensor(0), dist_reduce_fx="sum")
            self.add_state("largest", default=torch.tensor(0), dist_reduce_fx="max")
            self.add_state("latest", default=torch.tensor(0), dist_reduce_fx="mean")

        def update(self, x):
            values = x.double().sum(1)
            self.sum, self.count = self.sum + values.sum(), self.count + len(values)
            self.largest = values.max() if self.update_count == 1 else torch.maximum(self.largest, values.max())
            self.latest = torch.full((3,), 7.5, device=x.device)

        def compute(self):
            return torch.stack([self.sum / self.count, self.largest, self.latest.sum()])

    class Measured(line_class):
        def __init__(self):
            super().__init__()
            self.sums = Sums()
            self.seen = []

        def test_step(self, batch, batch_idx, dataloader_idx=0):
            self.sums.update(-batch[0].abs())
            self.seen += (-batch[0].abs()).sum(1).tolist()
            self.log("mean of steps", -batch[0].abs().sum(1).mean(), add_dataloader_idx=False)

        validation_step = test_step

        def on_validation_epoch_end(self):
            mean, largest, latest = self.sums.compute()
            self.log_dict({"mean": mean, "largest": largest, "latest": latest})
            value = sum(self.seen) / len(self.seen) if self.seen else float("nan")
            self.log_dict({"mean of ranks": value}, sync_dist=True)
            self.log("largest of ranks", max(self.seen, default=0.0), reduce_fx="max")
            self.sums.reset()

        on_test_epoch_end = on_validation_epoch_end

    return Measured


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("stage", ["validate", "test"])
def test_samples_of_few_batches_are_divided_and_a_rank_without_any_adds_nothing(
    quiet_trainer, make_line, measured_class, loader, averaging, count, stage
):
    [alone] = getattr(quiet_trainer(), stage)(make_line(measured_class), loader(count=count))
    trainer = quiet_trainer(strategy=averaging(), devices=2)
    [together] = getattr(trainer, stage)(make_line(measured_class), loader(count=count))
    if count in (3, 7):  # a mean of the means of ranks with different numbers of samples
        del alone["mean of ranks"], together["mean of ranks"]
    assert together == pytest.approx(alone, rel=1e-6)


def test_a_limit_and_several_loaders_count_divided_batches(quiet_trainer, make_line, measured_class, loader, averaging):
    class PerLoader(measured_class):
        def validation_step(self, batch, batch_idx, dataloader_idx):
            self.log("samples", float(len(batch[0])), reduce_fx="sum")

        def on_validation_epoch_end(self):
            pass

    loaders = [loader(count=1), loader(count=8), loader(count=24)]
    trainer = quiet_trainer(strategy=averaging(), devices=2, limit_val_batches=1)
    results = trainer.validate(make_line(PerLoader), loaders)
    assert [next(iter(values.values())) for values in results] == [1.0, 8.0, 16.0]


def test_predictions_keep_the_batches_of_one_device(quiet_trainer, line, loader, averaging):
    trainer = quiet_trainer(strategy=averaging(), devices=2)
    assert [len(batch) for batch in trainer.predict(line, loader(count=8))] == [8]


class NeverAgrees:
    """A strategy whose processes are not to communicate."""

    def reduce_boolean_decision(self, decision, **options):
        raise AssertionError("it communicates for each batch")


def test_processes_with_known_lengths_pad_without_agreeing_on_each_batch():
    padded = pad_to_longest([[1], [2]], [[0]], NeverAgrees(), 4)
    assert list(padded) == [([1], True), ([2], True), ([2], False), ([2], False)]
    assert list(pad_to_longest([], [[0]], NeverAgrees(), 1)) == [([0], False)]
