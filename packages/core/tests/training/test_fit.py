from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from dstrat import Callback, DataModule, LambdaCallback
from dstrat.builtin.single_device import SingleDeviceStrategy
from dstrat.errors import MisuseError, RankFailedError, RequestError


def weights(module):
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])


def by_hand(module, loader, *, epochs, accumulate=1, clip=None):
    """What the Trainer is compared with: the loop that everybody writes."""
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        batches = list(loader)
        for start in range(0, len(batches), accumulate):
            group = batches[start : start + accumulate]
            optimizer.zero_grad()
            for batch in group:
                loss = module.loss(batch) / len(group)
                loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(module.parameters(), clip)
            optimizer.step()


def test_training_equals_a_hand_written_loop_bit_for_bit(quiet_trainer, make_line, loader):
    theirs, ours = make_line(), make_line()
    torch.manual_seed(7)
    by_hand(theirs, loader(shuffle=True), epochs=2)
    torch.manual_seed(7)
    quiet_trainer().fit(ours, loader(shuffle=True))
    assert torch.equal(weights(theirs), weights(ours))


@pytest.mark.parametrize("batches", [6, 5], ids=["even groups", "an incomplete last group"])
def test_accumulation_and_clipping_equal_a_hand_written_loop(quiet_trainer, make_line, loader, batches):
    theirs, ours = make_line(), make_line()
    by_hand(theirs, loader(count=8 * batches), epochs=2, accumulate=2, clip=0.5)
    trainer = quiet_trainer(accumulate_grad_batches=2, gradient_clip_val=0.5)
    trainer.fit(ours, loader(count=8 * batches))
    assert torch.equal(weights(theirs), weights(ours))
    assert trainer.global_step == 6


def test_gradients_are_clipped_by_value_where_that_is_asked_for(quiet_trainer, make_line, loader):
    class Watching(type(make_line())):
        def on_before_optimizer_step(self, optimizer):
            self.before = self.layer.weight.grad.clone()

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.after = self.layer.weight.grad.clone()

    module = make_line(Watching)
    quiet_trainer(max_steps=1, gradient_clip_val=2.0, gradient_clip_algorithm="value").fit(module, loader())
    assert module.before.abs().max() > 2 > module.before.abs().min()
    assert torch.equal(module.after, module.before.clamp(-2, 2))


def test_max_steps_ends_training_within_an_epoch(quiet_trainer, line, loader):
    trainer = quiet_trainer(max_epochs=-1, max_steps=8)
    trainer.fit(line, loader())
    assert (trainer.global_step, trainer.fit_loop.batches_seen) == (8, 8)


@pytest.mark.parametrize(("limit", "steps"), [(2, 4), (0.5, 6), (1.0, 12), (0, 0), (100, 12)])
def test_limit_train_batches_takes_counts_and_fractions(quiet_trainer, line, loader, limit, steps):
    trainer = quiet_trainer(limit_train_batches=limit)
    trainer.fit(line, loader())
    assert trainer.global_step == steps


def test_a_loader_without_length_is_trained_to_its_end_with_its_last_group(quiet_trainer, line, loader):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(list(loader(batch_size=1))[:5])

    trainer = quiet_trainer(accumulate_grad_batches=2, max_epochs=1)
    trainer.fit(line, DataLoader(Stream(), batch_size=None))
    assert (trainer.fit_loop.batches_seen, trainer.global_step) == (5, 3)


@pytest.mark.parametrize(
    ("options", "runs"),
    [
        ({}, 2),
        ({"check_val_every_n_epoch": 2}, 1),
        ({"val_check_interval": 2}, 6),
        ({"val_check_interval": 0.5}, 4),
        ({"limit_val_batches": 0}, 0),
    ],
)
def test_validation_runs_when_it_is_due(quiet_trainer, make_line, loader, options, runs):
    class Counting(type(make_line())):
        count = 0

        def on_validation_epoch_end(self):
            self.count += 1

    module = make_line(Counting)
    quiet_trainer(num_sanity_val_steps=0, **options).fit(module, loader(), loader())
    assert module.count == runs


def test_the_module_trains_in_training_mode_and_validates_in_evaluation_mode(quiet_trainer, make_line, loader):
    class Modes(type(make_line())):
        def training_step(self, batch, batch_idx):
            assert self.training
            assert torch.is_grad_enabled()
            return super().training_step(batch, batch_idx)

        def validation_step(self, batch, batch_idx):
            assert not self.training
            assert not torch.is_grad_enabled()

    quiet_trainer(val_check_interval=2).fit(make_line(Modes), loader(), loader())


def test_schedulers_step_per_step_and_per_epoch(quiet_trainer, make_line, loader):
    class Scheduled(type(make_line())):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            schedulers = [
                {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step", "frequency": 3},
                torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
            ]
            return [optimizer], schedulers

        def on_train_start(self):
            self.rates = []

        def on_train_epoch_start(self):
            self.rates.append(self.optimizers().param_groups[0]["lr"])

        def on_train_end(self):
            self.rates.append(self.optimizers().param_groups[0]["lr"])

    module = make_line(Scheduled)
    quiet_trainer().fit(module, loader())
    assert module.rates == pytest.approx([0.05, 0.05 * 0.25 * 0.1, 0.05 * 0.25**2 * 0.1**2])


def test_a_scheduler_gets_the_value_that_it_monitors(quiet_trainer, make_line, loader):
    class Plateau(type(make_line())):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "val_loss"}

        def lr_scheduler_step(self, scheduler, metric):
            self.seen = [*getattr(self, "seen", []), float(metric)]
            super().lr_scheduler_step(scheduler, metric)

    module, trainer = make_line(Plateau), quiet_trainer()
    trainer.fit(module, loader(), loader())
    assert len(module.seen) == 2
    assert module.seen[-1] == float(trainer.callback_metrics["val_loss"])


def test_a_monitored_value_that_nobody_logged_is_named_with_the_known_ones(quiet_trainer, make_line, loader):
    class Plateau(type(make_line())):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "vall_loss"}}

    with pytest.raises(MisuseError, match=r"monitors 'vall_loss', which was not logged; logged were: .*val_loss"):
        quiet_trainer().fit(make_line(Plateau), loader(), loader())


def test_a_monitored_value_may_be_missing_where_that_is_said(quiet_trainer, make_line, loader):
    watched = []

    class Plateau(type(make_line())):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            config = {"scheduler": scheduler, "monitor": "val_loss", "strict": False}
            return {"optimizer": optimizer, "lr_scheduler": config}

        def lr_scheduler_step(self, scheduler, metric):
            watched.append((self.current_epoch, metric is not None))

    quiet_trainer(max_epochs=3, check_val_every_n_epoch=2).fit(make_line(Plateau), loader(), loader())
    assert watched == [(1, True), (2, True)]  # in the first epoch nothing had been logged


def test_a_closure_optimizer_evaluates_the_step_several_times(quiet_trainer, make_line, loader):
    class Closure(type(make_line())):
        calls = 0

        def training_step(self, batch, batch_idx):
            self.calls += 1
            return self.loss(batch)

        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=5)

    module = make_line(Closure)
    quiet_trainer(max_steps=2).fit(module, loader(48))
    assert module.calls > 4
    assert module.loss(next(iter(loader(48)))) < 1e-3


def test_overridden_optimization_hooks_take_part(quiet_trainer, make_line, loader):
    class Hooked(type(make_line())):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            self.steps = [*getattr(self, "steps", []), (epoch, batch_idx)]
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def optimizer_zero_grad(self, epoch, batch_idx, optimizer):
            optimizer.zero_grad(set_to_none=False)
            self.cleared = True

        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.clipped = (gradient_clip_val, gradient_clip_algorithm)

    module, plain = make_line(Hooked), make_line()
    quiet_trainer(limit_train_batches=1).fit(module, loader())
    quiet_trainer(limit_train_batches=1).fit(plain, loader())
    assert module.steps == [(0, 0), (1, 0)]
    assert module.cleared
    assert module.clipped == (None, "norm")
    assert torch.equal(weights(module), weights(plain))


def test_an_optimizer_that_wraps_another_is_stepped(quiet_trainer, make_line, loader):
    class Wrapper(torch.optim.SGD):
        def __init__(self, optimizer):
            super().__init__(optimizer.param_groups, lr=0.05)
            self.optimizer, self.steps = optimizer, 0

        def step(self, closure=None):
            self.steps += 1
            return super().step(closure)

    class Wrapped(type(make_line())):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)

        def configure_optimizers(self):
            return Wrapper(torch.optim.SGD(self.parameters(), lr=0.05))

    module = make_line(Wrapped)
    trainer = quiet_trainer(max_steps=3)
    trainer.fit(module, loader())
    assert trainer.optimizers[0].steps == 3


def test_a_step_without_a_loss_trains_nothing_and_counts(quiet_trainer, make_line, loader, caplog):
    class Skipping(type(make_line())):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 2 else self.loss(batch)

        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    ours, theirs = make_line(Skipping), make_line()
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(ours, loader())
    assert (trainer.fit_loop.batches_seen, trainer.global_step) == (6, 6)
    for index, batch in enumerate(loader()):
        optimizer = torch.optim.SGD(theirs.parameters(), lr=ours.lr * 0.5**index)
        if index % 2 == 0:
            theirs.loss(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
    assert torch.equal(weights(ours), weights(theirs))
    assert caplog.text.count("training_step of Skipping returned None: nothing is trained with such a batch") == 1


def test_steps_without_a_loss_end_at_the_number_of_steps(quiet_trainer, make_line, loader):
    class Forgetting(type(make_line())):
        def training_step(self, batch, batch_idx):
            self.loss(batch)

    trainer = quiet_trainer(max_epochs=-1, max_steps=10)
    trainer.fit(make_line(Forgetting), loader())
    assert (trainer.fit_loop.batches_seen, trainer.global_step) == (10, 10)


def test_an_optimizer_step_that_does_not_call_its_closure_is_an_error(quiet_trainer, make_line, loader):
    class Plain(type(make_line())):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
            optimizer.step()

    class Deaf(torch.optim.SGD):
        def step(self, closure=None):
            super().step()

    class Hard(type(make_line())):
        def configure_optimizers(self):
            return Deaf(self.parameters(), lr=0.1)

    with pytest.raises(
        MisuseError, match=r"^Plain\.optimizer_step did not call the closure, .*: call optimizer\.step\("
    ):
        quiet_trainer().fit(make_line(Plain), loader())
    with pytest.raises(MisuseError, match=r"^Deaf\.step did not call the closure, .*: call it there, or define"):
        quiet_trainer().fit(make_line(Hard), loader())


def test_transfer_hooks_see_each_batch(quiet_trainer, make_line, loader):
    class Transferring(type(make_line())):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [batch[0] * 0, batch[1] * 0]

    module = make_line(Transferring)
    trainer = quiet_trainer()
    trainer.fit(module, loader(), loader())
    assert float(trainer.callback_metrics["val_loss"]) == pytest.approx(module.layer.bias.item() ** 2)


def test_transfer_hooks_know_the_loader_of_a_batch(quiet_trainer, make_line, loader):
    moved = []

    class Moving(type(make_line())):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            moved.append((self.trainer.stage, dataloader_idx))
            return batch

        def test_step(self, batch, batch_idx, dataloader_idx):
            pass

    module, loaders = make_line(Moving), [loader(count=16), loader(count=8)]
    quiet_trainer().test(module, loaders)
    quiet_trainer(max_epochs=1).fit(module, loaders[0])
    assert moved == [("test", 0), ("test", 0), ("test", 1), ("fit", 0), ("fit", 0)]


def test_a_data_module_gives_the_loaders(quiet_trainer, line, loader):
    calls = []

    class Data(DataModule):
        def prepare_data(self):
            calls.append("prepare_data")

        def setup(self, stage):
            calls.append(f"setup {stage}")

        def train_dataloader(self):
            calls.append("train_dataloader")
            return loader()

        def val_dataloader(self):
            return [loader(), loader()]

        def teardown(self, stage):
            calls.append(f"teardown {stage}")

    trainer = quiet_trainer()
    trainer.fit(line, datamodule=Data())
    assert calls == ["prepare_data", "setup fit", "train_dataloader", "teardown fit"]
    assert {"val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"} <= trainer.callback_metrics.keys()


def test_several_loaders_give_a_result_each(quiet_trainer, make_line, loader):
    class Several(type(make_line())):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log("number", float(dataloader_idx))

    results = quiet_trainer().test(make_line(Several), [loader(), loader()])
    assert results == [{"number/dataloader_idx_0": 0.0}, {"number/dataloader_idx_1": 1.0}]


def test_predictions_come_back_in_the_order_of_the_batches(quiet_trainer, line, loader):
    predictions = quiet_trainer().predict(line, loader())
    expected = torch.cat([x.sum(1) for x, _ in loader()])
    assert torch.equal(torch.cat(predictions), expected)


def test_a_training_continues_from_its_checkpoint(quiet_trainer, make_line, loader, tmp_path):
    class Saving(Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    whole, first = make_line(), make_line()
    quiet_trainer(max_epochs=3).fit(whole, loader())
    quiet_trainer(max_epochs=1, callbacks=Saving()).fit(first, loader())
    resumed, trainer = make_line(lr=0.5), quiet_trainer(max_epochs=3)
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "0.ckpt")
    assert torch.equal(weights(whole), weights(resumed))
    assert (trainer.current_epoch, trainer.global_step) == (3, 18)


def test_weights_only_checkpoints_serve_evaluation_and_refuse_to_continue(quiet_trainer, make_line, loader, tmp_path):
    class Saving(Callback):
        def on_fit_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "w.ckpt", weights_only=True)

    trained = make_line()
    trainer = quiet_trainer(callbacks=Saving())
    trainer.fit(trained, loader(), loader())
    [result] = quiet_trainer().validate(make_line(), loader(), ckpt_path=tmp_path / "w.ckpt")
    assert result["val_loss"] == pytest.approx(float(trainer.callback_metrics["val_loss"]))
    with pytest.raises(OSError, match="weights only, and cannot continue a training"):
        quiet_trainer().fit(make_line(), loader(), ckpt_path=tmp_path / "w.ckpt")


def test_a_failing_fit_leaves_the_interpreter_ready_for_the_next(quiet_trainer, make_line, loader):
    class Failing(type(make_line())):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError("once")

    seen = []

    class Watching(Callback):
        def on_exception(self, trainer, module, exception):
            seen.append(str(exception))

    with pytest.raises(ZeroDivisionError, match="once"):
        quiet_trainer(callbacks=Watching()).fit(make_line(Failing), loader())
    module = make_line()
    quiet_trainer().fit(module, loader())
    assert seen == ["once"]


def test_two_processes_train_to_the_same_weights_as_one(quiet_trainer, make_line, loader, averaging):
    one, two = make_line(), make_line()
    quiet_trainer(strategy=averaging(), devices=2).fit(two, loader(batch_size=4))  # first, as its ranks are forked
    quiet_trainer().fit(one, loader(batch_size=8))
    assert torch.allclose(weights(one), weights(two), rtol=1e-6)


def test_numbers_and_collections_are_gathered(quiet_trainer, make_line, loader, averaging):
    class Gathering(type(make_line())):
        def test_step(self, batch, batch_idx):
            rank = self.global_rank
            gathered = self.all_gather({"numbers": [rank, 0.5], "tensors": (torch.full((2,), rank), "text")})
            assert gathered["numbers"][0].tolist() == [0, 1]
            assert gathered["numbers"][1].tolist() == [0.5, 0.5]
            assert gathered["tensors"][0].tolist() == [[0, 0], [1, 1]]
            assert gathered["tensors"][1] == "text"
            self.log("sum", self.all_gather(float(rank)).sum())

    [result] = quiet_trainer(strategy=averaging(), devices=2).test(make_line(Gathering), loader(24))
    assert result == {"sum": 1.0}


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_a_batch_that_is_none_is_left_out(quiet_trainer, make_line, loader, caplog, accumulate):
    def collate(samples):
        index = next(count)
        return None if index in (1, 5) else torch.utils.data.default_collate(samples)

    count = itertools.count()
    ours, theirs = make_line(), make_line()
    trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=accumulate)
    trainer.fit(ours, loader(collate_fn=collate))
    assert caplog.messages == [
        (
            "the training loader gave None as batch 1: such batches are left out, and are no step of optimizer or "
            "schedulers"
        )
    ]
    batches, optimizer = list(loader()), theirs.configure_optimizers()
    groups = {1: [(0,), (2,), (3,), (4,)], 2: [(0,), (2, 3), (4,)], 4: [(0, 2, 3), (4,)]}[accumulate]
    for group in groups:
        optimizer.zero_grad()
        for index in group:
            (theirs.loss(batches[index]) / len(group)).backward()
        optimizer.step()
    assert trainer.global_step == len(groups)
    assert torch.allclose(weights(ours), weights(theirs), rtol=1e-6)


def test_a_batch_that_is_none_on_one_of_several_processes_is_an_error(quiet_trainer, make_line, loader, averaging):
    def collate(samples):
        return None

    with pytest.raises(RankFailedError, match=r"the training loader gave None as batch 0 on rank \d of 2: the other"):
        quiet_trainer(strategy=averaging(), devices=2).fit(make_line(), loader(collate_fn=collate))


def test_clipping_takes_what_it_is_not_given_from_the_trainer(quiet_trainer, make_line, loader):
    class Clipping(type(make_line())):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.clip_gradients(optimizer)

    ours, theirs = make_line(Clipping), make_line()
    quiet_trainer(gradient_clip_val=0.1, gradient_clip_algorithm="value").fit(ours, loader())
    quiet_trainer(gradient_clip_val=0.1, gradient_clip_algorithm="value").fit(theirs, loader())
    assert torch.equal(weights(ours), weights(theirs))
    assert quiet_trainer(gradient_clip_algorithm=None).gradient_clip_algorithm == "norm"


def test_a_maximum_of_0_clips_nothing(quiet_trainer, make_line, loader):
    class Clipping(type(make_line())):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm):
            self.clip_gradients(optimizer, 0)

    ours, theirs = make_line(Clipping), make_line()
    quiet_trainer().fit(ours, loader())
    quiet_trainer().fit(theirs, loader())
    assert torch.equal(weights(ours), weights(theirs))


def test_two_processes_shuffle_into_disjoint_parts(quiet_trainer, make_line, loader, averaging):
    class Seen(type(make_line())):
        def on_train_epoch_start(self):
            self.rows = []

        def training_step(self, batch, batch_idx):
            self.rows.append(batch[1].flatten())
            return self.loss(batch)

        def on_train_epoch_end(self):
            rows = self.all_gather(torch.cat(self.rows)).flatten()
            self.log("distinct", float(len(set(rows.tolist()))))
            self.log("first", float(rows[0]))

    firsts = []
    for seed in (3, 3, 5):
        trainer = quiet_trainer(strategy=averaging(), devices=2, max_epochs=1)
        module = make_line(Seen)
        torch.manual_seed(seed)
        trainer.fit(module, loader(batch_size=4, shuffle=True))
        assert trainer.callback_metrics["distinct"] == 48
        firsts.append(trainer.callback_metrics["first"])
    assert firsts[0] == firsts[1] != firsts[2]


@pytest.mark.parametrize("devices", [2, 3])
def test_evaluation_counts_each_sample_once_on_several_processes(quiet_trainer, make_line, loader, averaging, devices):
    module = make_line()
    [one] = quiet_trainer().validate(module, loader(batch_size=5))
    [several] = quiet_trainer(strategy=averaging(), devices=devices).validate(module, loader(batch_size=5))
    assert several == pytest.approx(one, rel=1e-6)


def test_each_process_evaluates_everything_where_the_data_is_not_divided(quiet_trainer, make_line, loader, averaging):
    class Counting(type(make_line())):
        def test_step(self, batch, batch_idx):
            self.log("samples", float(len(batch[0])), reduce_fx="sum")

    trainer = quiet_trainer(strategy=averaging(), devices=2, use_distributed_sampler=False)
    assert trainer.test(make_line(Counting), loader()) == [{"samples": 2 * 48.0}]
    assert len(trainer.predict(make_line(Counting), loader())) == 6


def test_predictions_of_several_processes_come_back_in_order(quiet_trainer, line, loader, averaging):
    trainer = quiet_trainer(strategy=averaging(), devices=3)
    predictions = trainer.predict(line, loader(batch_size=5))
    expected = torch.cat([x.sum(1) for x, _ in loader()])
    assert torch.equal(torch.cat(predictions), expected)


def test_a_rank_that_raises_ends_the_fit_and_is_named(quiet_trainer, make_line, loader, averaging):
    class Failing(type(make_line())):
        def training_step(self, batch, batch_idx):
            if self.global_rank == 1 and batch_idx == 2:
                raise ZeroDivisionError("in rank one")
            return self.loss(batch)

    with pytest.raises(RankFailedError, match=r"rank 1 of 2 failed: ZeroDivisionError: in rank one") as failure:
        quiet_trainer(strategy=averaging(), devices=2).fit(make_line(Failing), loader(4))
    assert "in training_step" in failure.value.rank_traceback
    module = make_line()
    quiet_trainer(strategy=averaging(), devices=2).fit(module, loader(4))


def test_a_step_that_returns_none_is_an_error_on_several_processes(quiet_trainer, make_line, loader, averaging):
    class Skipping(type(make_line())):
        def training_step(self, batch, batch_idx):
            return None if self.global_rank else self.loss(batch)

    with pytest.raises(RankFailedError, match="training_step returned None on rank 1 of 2"):
        quiet_trainer(strategy=averaging(), devices=2).fit(make_line(Skipping), loader(4))


class Jobs(SingleDeviceStrategy):
    """A job among others that train with it."""

    steps_with_other_jobs = True

    def backward(self, loss, *args, **kwargs):
        super().backward(loss, *args, **kwargs)
        self.averaged = [parameter.grad.cpu().clone() for parameter in self.module.parameters()]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_that_returns_none_is_an_error_in_one_of_several_jobs(quiet_trainer, make_line, loader, accumulate):
    class Skipping(type(make_line())):
        def training_step(self, batch, batch_idx):
            return None if batch_idx == 1 else self.loss(batch)

    trainer = quiet_trainer(strategy=Jobs(), accumulate_grad_batches=accumulate)
    with pytest.raises(MisuseError, match="training_step returned None in one of several jobs that train together: th"):
        trainer.fit(make_line(Skipping), loader())


def test_a_batch_that_is_none_is_an_error_in_one_of_several_jobs(quiet_trainer, make_line, loader):
    with pytest.raises(MisuseError, match="gave None as batch 0 in one of several jobs that train together: the othe"):
        quiet_trainer(strategy=Jobs()).fit(make_line(), loader(collate_fn=lambda samples: None))


def test_jobs_average_the_mean_of_the_batches_that_are_in_a_step(quiet_trainer, make_line, loader):
    class Endless(torch.utils.data.IterableDataset):  # it has no length: the last group is expected to be full
        def __iter__(self):
            return iter(batches)

    batches, module, theirs = list(loader(count=40)), make_line(), make_line()
    strategy = Jobs()
    trainer = quiet_trainer(strategy=strategy, accumulate_grad_batches=3, max_epochs=1)
    trainer.fit(module, DataLoader(Endless(), batch_size=None))
    by_hand(theirs, batches, epochs=1, accumulate=3)
    assert torch.allclose(weights(module), weights(theirs), rtol=1e-6)
    assert all(map(torch.equal, strategy.averaged, (parameter.grad for parameter in module.parameters())))


def test_an_epoch_that_max_steps_breaks_off_is_not_counted(quiet_trainer, make_line, loader):
    class Plateau(type(make_line())):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}

    trainer = quiet_trainer(max_steps=3, max_epochs=-1, num_sanity_val_steps=0)
    trainer.fit(make_line(Plateau), loader(), loader())
    assert (trainer.global_step, trainer.fit_loop.epochs_done) == (3, 0)


def test_a_layer_that_the_user_put_into_evaluation_mode_stays_there(quiet_trainer, make_line, loader, caplog):
    class Frozen(type(make_line())):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8).eval().requires_grad_(False)

        def loss(self, batch):
            return super().loss((self.norm(batch[0]), batch[1]))

    module = make_line(Frozen)
    quiet_trainer(val_check_interval=2).fit(module, loader(), loader())
    assert not module.norm.training
    assert module.layer.training
    assert torch.equal(module.norm.running_mean, torch.zeros(8))
    assert "1 of 3 modules are in evaluation mode and stay so while training" in caplog.text


def test_a_step_without_a_loss_leaves_the_gradients_of_its_group_alone(quiet_trainer, make_line, loader):
    class Skipping(type(make_line())):
        skipped = ()

        def training_step(self, batch, batch_idx):
            return None if batch_idx in self.skipped else self.loss(batch)

    batches = list(loader())
    for skipped, groups in [((2,), [(0, 1), (3,), (4, 5)]), ((3,), [(0, 1), (2,), (4, 5)])]:
        ours, theirs = make_line(Skipping), make_line()
        ours.skipped = skipped
        trainer = quiet_trainer(max_epochs=1, accumulate_grad_batches=2)
        trainer.fit(ours, loader())
        optimizer = theirs.configure_optimizers()
        for group in groups:
            optimizer.zero_grad()
            for index in group:
                (theirs.loss(batches[index]) / len(group)).backward()
            optimizer.step()
        assert trainer.global_step == 3
        assert torch.equal(weights(ours), weights(theirs)), skipped


def test_a_limit_above_the_end_of_a_loader_without_length_still_validates(quiet_trainer, make_line, loader):
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(list(loader(batch_size=1))[:5])

    trainer = quiet_trainer(accumulate_grad_batches=2, max_epochs=1, limit_train_batches=100)
    trainer.fit(make_line(), DataLoader(Stream(), batch_size=None), loader())
    assert trainer.global_step == 3
    assert "val_loss" in trainer.callback_metrics


def test_training_draws_the_same_numbers_with_and_without_a_sanity_check(quiet_trainer, make_line, loader):
    trained = []
    for steps in (0, 2):
        module = make_line()
        quiet_trainer(num_sanity_val_steps=steps).fit(module, loader(shuffle=True), loader(shuffle=True))
        trained.append(weights(module))
    assert torch.equal(*trained)


def test_a_data_module_may_stand_where_loaders_are_expected(quiet_trainer, line, loader):
    class Data(DataModule):
        def train_dataloader(self):
            return loader()

    trainer = quiet_trainer()
    trainer.fit(line, Data())
    assert trainer.global_step == 12


def test_teardown_follows_an_exception_too_and_its_own_errors_leave_nothing_open(quiet_trainer, make_line, loader):
    calls = []

    class Failing(type(make_line())):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

        def teardown(self, stage):
            calls.append(f"teardown {stage}")
            raise OSError("while tearing down")

    def fail(trainer, module, stage):
        raise OSError("in the teardown of a callback")

    module, trainer = make_line(Failing), quiet_trainer(callbacks=LambdaCallback(teardown=fail))
    with pytest.raises(ZeroDivisionError):
        trainer.fit(module, loader())
    with pytest.raises(OSError, match="in the teardown of a callback"):
        trainer.validate(module, loader())
    assert calls == ["teardown fit", "teardown validate"]
    assert not trainer.is_running


@pytest.mark.parametrize("kind", ["shuffled", "batch sampler", "own batch sampler", "own sampler"])
def test_evaluation_reads_each_sample_once_in_whatever_order(quiet_trainer, make_line, loader, averaging, kind):
    class Diverging(type(make_line())):
        def on_predict_start(self):
            torch.manual_seed(self.global_rank)  # the processes would draw different orders

    class Pairs(BatchSampler):
        pass

    data = loader().dataset
    shuffled = RandomSampler(data)
    evaluated = {
        "shuffled": lambda: DataLoader(data, batch_size=5, shuffle=True),
        "batch sampler": lambda: DataLoader(data, batch_sampler=BatchSampler(shuffled, 5, False)),
        "own batch sampler": lambda: DataLoader(data, batch_sampler=Pairs(shuffled, 5, False)),
        "own sampler": lambda: DataLoader(data, batch_size=5, sampler=RandomSampler(data, num_samples=48)),
    }[kind]()
    predictions = quiet_trainer(strategy=averaging(), devices=2).predict(make_line(Diverging), evaluated)
    expected = torch.cat([x.sum(1) for x, _ in loader()])
    assert torch.equal(torch.cat(predictions).sort().values, expected.sort().values)


def test_a_plain_batch_sampler_is_divided_in_training(quiet_trainer, make_line, loader, averaging):
    one, two = make_line(), make_line()
    data = loader().dataset
    batches = DataLoader(data, batch_sampler=BatchSampler(SequentialSampler(data), 4, False))
    quiet_trainer(strategy=averaging(), devices=2).fit(two, batches)  # first, as its ranks are forked
    quiet_trainer().fit(one, loader(batch_size=8))
    assert torch.allclose(weights(one), weights(two), rtol=1e-6)


class TestWrongUse:
    def test_a_plateau_scheduler_without_a_value_to_watch(self, quiet_trainer, make_line, loader):
        class Plateau(type(make_line())):
            def configure_optimizers(self):
                optimizer = super().configure_optimizers()
                return [optimizer], [torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)]

        with pytest.raises(MisuseError, match="ReduceLROnPlateau needs a value to watch"):
            quiet_trainer().fit(make_line(Plateau), loader())

    def test_a_fraction_of_less_than_one_batch(self, quiet_trainer, line, loader):
        with pytest.raises(RequestError, match=r"limit_train_batches=0\.1 of 6 batches is less than one"):
            quiet_trainer(limit_train_batches=0.1).fit(line, loader())

    def test_a_module_without_training_step(self, quiet_trainer, make_line, loader):
        class Incomplete(type(make_line())):
            training_step = type(make_line()).__mro__[1].training_step

        with pytest.raises(MisuseError, match="Incomplete has no training_step: define training_step"):
            quiet_trainer().fit(make_line(Incomplete), loader())

    def test_a_module_without_configure_optimizers(self, quiet_trainer, make_line, loader):
        class Incomplete(type(make_line())):
            configure_optimizers = type(make_line()).__mro__[1].configure_optimizers

        with pytest.raises(MisuseError, match="Incomplete has no configure_optimizers: define it and return"):
            quiet_trainer().fit(make_line(Incomplete), loader())

    def test_a_plain_nn_module(self, quiet_trainer, loader):
        with pytest.raises(MisuseError, match=r"Linear is not a TrainModule: derive it from dstrat\.TrainModule"):
            quiet_trainer().fit(nn.Linear(8, 1), loader())

    def test_no_loader(self, quiet_trainer, line):
        with pytest.raises(MisuseError, match=r"no train loader: pass one, .* or define Line.train_dataloader"):
            quiet_trainer().fit(line)

    def test_something_that_is_no_loader(self, quiet_trainer, line):
        with pytest.raises(MisuseError, match="the train loader is a int, over which one cannot iterate"):
            quiet_trainer().fit(line, 3)

    def test_loaders_and_a_data_module(self, quiet_trainer, line, loader):
        with pytest.raises(MisuseError, match="loaders were passed for train, and a datamodule too"):
            quiet_trainer().fit(line, loader(), datamodule=DataModule())

    @pytest.mark.parametrize(
        ("limits", "position"),
        [({}, "epoch 2 of 2, step 12"), ({"max_epochs": None, "max_steps": 7}, "epoch 1, step 7")],
    )
    def test_a_finished_trainer(self, quiet_trainer, line, loader, limits, position):
        trainer = quiet_trainer(**limits)
        trainer.fit(line, loader())
        with pytest.raises(MisuseError, match=rf"has finished its fit \({position}\)"):
            trainer.fit(line, loader())

    @pytest.mark.parametrize(
        ("outputs", "message"),
        [
            (lambda loss: {"los": loss}, r"a dict with 'los' and without 'loss': return the loss, a tensor"),
            (lambda loss: {"loss": None}, r"a dict whose 'loss' is NoneType: return the loss"),
            (lambda loss: loss.item(), r"\d+\.\d+ \(float\): return the loss, a tensor with one element"),
            (lambda loss: [loss], r"list: return the loss"),
            (lambda loss: loss.expand(8, 1), r"a loss of shape \(8, 1\): return one number, such as loss.mean\(\)"),
            (lambda loss: {"loss": loss.expand(2)}, r"a loss of shape \(2,\): return one number"),
            (lambda loss: loss.detach(), r"a loss of shape \(\) that does not depend on the parameters, .* detach\(\)"),
            (lambda loss: loss * 1j, r"a loss of shape \(\) and torch.complex64: return a real number"),
        ],
    )
    @pytest.mark.parametrize("accumulate", [1, 4])
    def test_a_step_without_a_loss(self, quiet_trainer, make_line, loader, outputs, message, accumulate):
        class Strange(type(make_line())):
            def training_step(self, batch, batch_idx):
                return outputs(self.loss(batch))

        with pytest.raises(MisuseError, match=f"^training_step returned {message}"):
            quiet_trainer(accumulate_grad_batches=accumulate).fit(make_line(Strange), loader())

    def test_a_loss_of_a_module_that_is_frozen(self, quiet_trainer, line, loader):
        line.requires_grad_(False)
        with pytest.raises(MisuseError, match="as no parameter of Line requires them: unfreeze some"):
            quiet_trainer().fit(line, loader())

    def test_an_error_of_the_backward_pass_that_is_not_the_losss_fault(self, quiet_trainer, make_line, loader):
        class Failing(type(make_line())):
            def on_before_backward(self, loss):
                raise RuntimeError("out of something")

        with pytest.raises(RuntimeError, match=r"^out of something$"):
            quiet_trainer().fit(make_line(Failing), loader())

    def test_accumulation_with_an_optimizer_that_repeats_the_step(self, quiet_trainer, make_line, loader):
        class Closure(type(make_line())):
            def configure_optimizers(self):
                return torch.optim.LBFGS(self.parameters(), max_iter=3)

        with pytest.raises(MisuseError, match="LBFGS computes the loss of a batch several times in one step"):
            quiet_trainer(accumulate_grad_batches=2).fit(make_line(Closure), loader())

    def test_several_optimizers(self, quiet_trainer, make_line, loader):
        class Two(type(make_line())):
            def configure_optimizers(self):
                return [super().configure_optimizers(), super().configure_optimizers()]

        with pytest.raises(MisuseError, match="returned 2 optimizers, and automatic optimization steps one"):
            quiet_trainer().fit(make_line(Two), loader())

    def test_a_validation_interval_that_never_comes(self, quiet_trainer, line, loader):
        with pytest.raises(MisuseError, match="val_check_interval=7 is more than the 6 training batches"):
            quiet_trainer(val_check_interval=7).fit(line, loader(), loader())

    @pytest.mark.parametrize(
        ("argument", "value", "message"),
        [
            ("limit_train_batches", 1.5, "limit_train_batches=1.5 must be a number of batches"),
            ("limit_val_batches", -1, "limit_val_batches=-1 must be"),
            ("max_epochs", -2, "max_epochs=-2 must be an int of at least -1"),
            ("max_steps", 2.5, "max_steps=2.5 must be an int"),
            ("accumulate_grad_batches", 0, "accumulate_grad_batches=0 must be an int of at least 1"),
            ("gradient_clip_val", -1, "gradient_clip_val=-1 must be a positive number"),
            ("gradient_clip_algorithm", "norms", "gradient_clip_algorithm='norms' must be 'norm' or 'value'"),
            ("val_check_interval", 0, "val_check_interval=0 must be"),
            ("callbacks", [Callback], "is not a Callback"),
            ("callbacks", Callback, "is not a Callback"),
            ("logger", ["csv"], "logger='csv' is not a Logger"),
        ],
    )
    def test_an_argument_out_of_range(self, quiet_trainer, argument, value, message):
        with pytest.raises(RequestError, match=message):
            quiet_trainer(**{argument: value})


@pytest.mark.parametrize("weights_only", [True, False])
def test_weights_only_of_lightning_is_taken_and_changes_nothing(
    quiet_trainer, make_line, loader, tmp_path, weights_only
):
    trainer, line = quiet_trainer(max_steps=1), make_line()
    trainer.fit(line, loader(), None, None, None, weights_only)
    trainer.save_checkpoint(tmp_path / "end")
    resumed = quiet_trainer(max_steps=2)
    resumed.fit(make_line(), loader(), ckpt_path=tmp_path / "end", weights_only=weights_only)
    assert resumed.global_step == 2
    for stage in ("validate", "test", "predict"):
        getattr(trainer, stage)(line, loader(), ckpt_path=tmp_path / "end", weights_only=weights_only)


def test_a_module_may_have_a_length_that_is_an_error(quiet_trainer, make_line, loader):
    class Measured(type(make_line())):
        def __len__(self):
            raise TypeError("nobody is to ask for it")

    module = Measured()
    quiet_trainer(max_epochs=1).fit(module, loader())
    assert module.trainer.global_step > 0


def test_a_step_that_an_epoch_replaces_is_called(quiet_trainer, line_class, loader):
    class Module(line_class):
        def on_train_epoch_start(self):
            if self.trainer.current_epoch == 1:
                self.training_step = self.second

        def second(self, batch):
            seen.append(self.trainer.current_epoch)
            return self.loss(batch)

    seen = []
    quiet_trainer(limit_train_batches=2).fit(Module(), loader())
    assert seen == [1, 1]


def test_clipping_that_is_set_in_a_fit_begins_with_the_epoch(quiet_trainer, line_class, loader):
    class Module(line_class):
        def on_train_epoch_start(self):
            if self.trainer.current_epoch == 1:
                self.trainer.gradient_clip_val = 1e-9

        def on_before_zero_grad(self, optimizer):
            weights.append(self.layer.weight.detach().clone())

    weights = []
    quiet_trainer(max_epochs=3, limit_train_batches=1).fit(Module(), loader())
    first, second, third = weights
    assert not torch.allclose(first, second)
    assert torch.allclose(second, third, rtol=0, atol=1e-8)


def test_epochs_that_are_set_at_the_loop_are_the_trainers(quiet_trainer, line, loader):
    trainer = quiet_trainer(max_epochs=1, limit_train_batches=1)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(line, loader())
    assert (trainer.max_epochs, trainer.fit_loop.max_epochs, trainer.current_epoch) == (3, 3, 3)
