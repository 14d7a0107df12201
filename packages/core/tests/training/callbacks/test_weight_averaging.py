from __future__ import annotations

import pickle

import pytest
import torch
from torch.optim.swa_utils import get_ema_avg_fn

from dstrat import Callback, EMAWeightAveraging, ModelCheckpoint, WeightAveraging
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.training.module.loading import read_checkpoint


class Record(Callback):
    """Keeps the weights after each step, before each epoch's end, and as validation sees them."""

    def __init__(self):
        self.steps, self.validated = [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.steps.append(module.layer.weight.detach().cpu().clone())

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.validated.append(module.layer.weight.detach().cpu().clone())


class OfEpochs(WeightAveraging):
    def should_update(self, step_idx=None, epoch_idx=None):
        return epoch_idx is not None and epoch_idx >= 1


class Normalized(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(1, 8))
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("table", torch.tensor([3, 1, 2]))

    def forward(self, x):
        return torch.nn.functional.linear(self.norm(x), self.weight)


def on_host(named_tensors):
    return {name: tensor.cpu().clone() for name, tensor in named_tensors}


def ema(values, decay):
    average = values[0]
    for value in values[1:]:
        average = decay * average + (1 - decay) * value
    return average


@pytest.fixture
def train(fit, make_line):
    def train_(averaging, *others, module=None, **options):
        record, module = Record(), module or make_line()
        options = {"limit_train_batches": 3, "max_epochs": 2, "num_sanity_val_steps": 0} | options
        fit([averaging, record, *others], module=module, **options)
        return record, module.layer.weight

    return train_


def test_the_module_ends_with_the_mean_of_its_weights(train):
    record, weight = train(WeightAveraging())
    assert torch.allclose(weight, torch.stack(record.steps).mean(0))


def test_the_module_ends_with_the_exponential_moving_average(train):
    record, weight = train(EMAWeightAveraging(decay=0.5))
    assert torch.allclose(weight, ema(record.steps, 0.5))


def test_training_itself_is_not_changed(train):
    averaged, _ = train(EMAWeightAveraging(decay=0.5))
    plain, _ = train(Callback())
    assert all(map(torch.equal, averaged.steps, plain.steps))


def test_validation_sees_the_average_and_training_goes_on_without_it(train):
    record, _ = train(EMAWeightAveraging(decay=0.5), limit_val_batches=1)
    assert torch.allclose(record.validated[0], ema(record.steps[:3], 0.5))
    assert torch.allclose(record.validated[1], ema(record.steps, 0.5))


def test_until_there_is_an_average_validation_uses_the_weights(train):
    record, weight = train(OfEpochs(), limit_val_batches=1, max_epochs=3)
    assert torch.equal(record.validated[0], record.steps[2])
    assert torch.equal(record.validated[1], record.steps[5])
    assert torch.equal(record.validated[2], record.steps[5])
    assert torch.allclose(weight, (record.steps[5] + record.steps[8]) / 2)


def test_where_nothing_was_averaged_the_weights_stay_and_a_line_says_so(train, caplog):
    record, weight = train(OfEpochs(), max_epochs=1)
    assert torch.equal(weight, record.steps[-1])
    assert caplog.messages == ["OfEpochs never took the weights into an average: they stay as trained"]


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"update_every_n_steps": 2}, [0, 2, 4]),
        ({"update_starting_at_step": 3}, [3, 4, 5]),
        ({"update_every_n_steps": 2, "update_starting_at_step": 3}, [4]),
        ({"update_starting_at_step": 100, "update_starting_at_epoch": 0}, [2, 5]),
    ],
)
def test_when_the_average_is_updated_can_be_chosen(train, arguments, taken):
    record, weight = train(EMAWeightAveraging(decay=0.5, **arguments))
    assert torch.allclose(weight, ema([record.steps[index] for index in taken], 0.5))


@pytest.mark.parametrize(
    ("arguments", "taken"),
    [
        ({"update_every_n_steps": 2}, [0, 1, 2, 3, 4, 5]),
        ({"update_every_n_steps": 4}, [0, 2, 4]),
        ({"update_every_n_steps": 5}, [0, 2, 5]),
        ({"update_every_n_steps": 2, "update_starting_at_step": 5}, [3, 4, 5]),
    ],
)
def test_batches_of_several_steps_are_updates_too(train, make_line, line_class, tmp_path, arguments, taken):
    class TwoSteps(line_class):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(self.loss(batch))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD([each], lr=0.05) for each in self.layer.parameters()]

    record, weight = train(EMAWeightAveraging(decay=0.5, **arguments), module=make_line(TwoSteps))
    assert torch.allclose(weight, ema([record.steps[index] for index in taken], 0.5))
    save = ModelCheckpoint(tmp_path, "{epoch}")
    options = {"module": make_line(TwoSteps), "enable_checkpointing": True}
    train(EMAWeightAveraging(decay=0.5, **arguments), save, max_epochs=1, **options)
    _, resumed = train(
        EMAWeightAveraging(decay=0.5, **arguments), module=make_line(TwoSteps), ckpt_path=save.best_model_path
    )
    assert torch.equal(resumed, weight)


def test_an_average_that_a_resumed_fit_begins_is_updated_in_the_same_steps(train, tmp_path):
    train(Callback(), ModelCheckpoint(tmp_path, "a"), max_epochs=1, enable_checkpointing=True)
    averaging = EMAWeightAveraging(decay=0.5, update_every_n_steps=4)
    record, weight = train(averaging, ckpt_path=tmp_path / "a.ckpt")  # after three steps
    assert torch.allclose(weight, record.steps[1])


def test_accumulated_batches_are_one_update(train):
    record, weight = train(WeightAveraging(), accumulate_grad_batches=3)
    assert torch.allclose(weight, (record.steps[2] + record.steps[5]) / 2)


def test_a_way_of_averaging_can_be_given(train):
    record, weight = train(WeightAveraging(avg_fn=get_ema_avg_fn(0.5)))
    assert torch.allclose(weight, ema(record.steps, 0.5))


def test_a_way_of_averaging_gets_a_tensor_as_the_number_of_updates(train):
    def mean(average, weight, num_averaged):
        return average + (weight - average) / (num_averaged.to(average.device) + 1)

    record, weight = train(WeightAveraging(avg_fn=mean))
    assert torch.allclose(weight, sum(record.steps) / len(record.steps))


@pytest.mark.parametrize("use_buffers", [True, False])
def test_buffers_are_averaged_or_copied_and_counts_are_always_copied(fit, make_line, use_buffers):
    module, seen = make_line(), []
    module.layer = Normalized()
    keep = Callback()
    keep.on_train_batch_end = lambda *_: seen.append(on_host(module.layer.named_buffers()))
    averaging = EMAWeightAveraging(decay=0.5, use_buffers=use_buffers)
    fit([averaging, keep], module=module, limit_train_batches=3, max_epochs=1, validates=False)
    means = [buffers["norm.running_mean"] for buffers in seen]
    assert torch.allclose(module.layer.norm.running_mean, ema(means, 0.5) if use_buffers else means[-1])
    assert module.layer.norm.num_batches_tracked == 3
    assert module.layer.table.tolist() == [3, 1, 2]


def test_evaluation_after_the_fit_uses_the_average(fit, make_line, loader):
    module, record = make_line(), Record()
    trainer = fit([WeightAveraging(), record], module=module, limit_train_batches=3, max_epochs=1, validates=False)
    (results,) = trainer.test(module, loader())
    average = make_line()
    average.layer.bias.data.copy_(module.layer.bias)
    average.layer.weight.data.copy_(torch.stack(record.steps).mean(0))
    (expected,) = fit(None, module=make_line(), max_epochs=1).test(average, loader())
    assert results["test_loss"] == pytest.approx(expected["test_loss"])
    assert trainer.validate(module, loader())


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_what_is_saved_after_an_evaluation_resumes_the_training(fit, make_line, loader, tmp_path, stage):
    module, record = make_line(), Record()
    callbacks = [EMAWeightAveraging(decay=0.5), record]
    trainer = fit(callbacks, module=module, limit_train_batches=3, max_epochs=1, validates=False)
    average = module.layer.weight.detach().clone()
    getattr(trainer, stage)(module, loader())
    assert torch.equal(module.layer.weight, average)
    trainer.save_checkpoint(tmp_path / "end")
    saved = read_checkpoint(tmp_path / "end")
    assert torch.equal(saved["state_dict"]["layer.weight"], average)
    assert torch.equal(saved["current_model_state"]["layer.weight"], record.steps[-1])
    resumed = make_line()
    fit(EMAWeightAveraging(decay=0.5), module=resumed, limit_train_batches=3, max_epochs=2, ckpt_path=tmp_path / "end")
    whole = make_line()
    fit(EMAWeightAveraging(decay=0.5), module=whole, limit_train_batches=3, max_epochs=2)
    assert torch.equal(resumed.layer.weight, whole.layer.weight)


def test_an_evaluation_that_fails_leaves_the_average_of_the_fit(fit, make_line, loader):
    class Break(Callback):
        def on_validation_batch_end(self, *_):
            raise RuntimeError("broken")

    module = make_line()
    trainer = fit([WeightAveraging(), Break()], module=module, validates=False)
    average = module.layer.weight.detach().clone()
    with pytest.raises(RuntimeError, match="broken"):
        trainer.validate(module, loader())
    assert torch.equal(module.layer.weight, average)


def test_what_is_saved_after_other_weights_were_loaded_has_these(fit, make_line, loader, tmp_path):
    fit(None, module=make_line(), max_epochs=1).save_checkpoint(tmp_path / "other")
    trainer = fit(WeightAveraging(), module=(module := make_line()), validates=False)
    trainer.validate(module, loader(), ckpt_path=tmp_path / "other")
    trainer.save_checkpoint(tmp_path / "end")
    saved = read_checkpoint(tmp_path / "end")
    assert torch.equal(saved["state_dict"]["layer.weight"], module.layer.weight)
    assert "current_model_state" not in saved


def test_evaluation_of_a_checkpoint_uses_the_average(train, make_line, quiet_trainer, loader, tmp_path):
    save = ModelCheckpoint(tmp_path, "a")
    _, weight = train(WeightAveraging(), save, enable_checkpointing=True)
    module = make_line()
    quiet_trainer(callbacks=WeightAveraging()).test(module, loader(), ckpt_path=save.best_model_path)
    assert torch.equal(module.layer.weight, weight)


@pytest.mark.parametrize("batches", [1, 3])
@pytest.mark.parametrize("make", [WeightAveraging, lambda: EMAWeightAveraging(decay=0.5), OfEpochs])
def test_a_run_that_goes_on_ends_with_the_same_average(train, tmp_path, make, batches):
    def save(folder):
        return ModelCheckpoint(tmp_path / folder, "{step}", save_top_k=-1)

    options = {"enable_checkpointing": True, "accumulate_grad_batches": batches}
    _, expected = train(make(), save("whole"), max_epochs=4, **options)
    record, weight = train(make(), save("a"), max_epochs=2, **options)
    path = tmp_path / "a" / f"step={6 // batches}.ckpt"
    saved = read_checkpoint(path)
    assert torch.equal(saved["state_dict"]["layer.weight"], weight)
    assert torch.equal(saved["current_model_state"]["layer.weight"], record.steps[-1])
    _, resumed = train(make(), save("b"), max_epochs=4, ckpt_path=path, **options)
    assert torch.equal(resumed, expected)


class SaveBefore(Callback):
    """Saves in hooks that are called before those of the callbacks after it."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        trainer.save_checkpoint(self.folder / f"batch {trainer.fit_loop.batches_seen}")

    def on_train_epoch_end(self, trainer, module):
        trainer.save_checkpoint(self.folder / f"epoch {trainer.current_epoch}")


@pytest.mark.parametrize("saved", ["batch 1", "batch 2", "batch 5", "epoch 0", "epoch 1"])
@pytest.mark.parametrize(
    ("make", "accumulate"),
    [
        (WeightAveraging, 1),
        (OfEpochs, 2),
        pytest.param(WeightAveraging, 2, marks=pytest.mark.variant),
        pytest.param(OfEpochs, 1, marks=pytest.mark.variant),
    ],
)
def test_what_a_callback_before_it_saves_lacks_no_update(fit, make_line, tmp_path, make, saved, accumulate):
    def train(*callbacks, **options):
        module = make_line()
        options |= {"limit_train_batches": 3, "max_epochs": 3, "accumulate_grad_batches": accumulate}
        fit([*callbacks, make()], module=module, **options)
        return module.layer.weight

    whole = train()
    assert torch.equal(train(SaveBefore(tmp_path)), whole)
    assert torch.equal(train(ckpt_path=tmp_path / saved), whole)


def test_a_checkpoint_without_an_average_starts_one(train, tmp_path):
    options = {"enable_checkpointing": True}
    train(Callback(), ModelCheckpoint(tmp_path, "a"), max_epochs=1, **options)
    record, weight = train(WeightAveraging(), ModelCheckpoint(tmp_path, "b"), ckpt_path=tmp_path / "a.ckpt", **options)
    assert len(record.steps) == 3
    assert torch.allclose(weight, torch.stack(record.steps).mean(0))


def test_checkpoints_of_weights_have_the_average_alone(train, tmp_path):
    callback = ModelCheckpoint(tmp_path, "a", save_weights_only=True)
    _, weight = train(WeightAveraging(), callback, enable_checkpointing=True)
    saved = read_checkpoint(callback.best_model_path)
    assert torch.equal(saved["state_dict"]["layer.weight"], weight)
    assert "current_model_state" not in saved


def test_what_is_saved_while_validation_uses_the_average_is_the_same(train, tmp_path):
    class Save(Callback):
        def on_validation_epoch_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / f"{trainer.current_epoch}.ckpt")

    record, weight = train(WeightAveraging(), Save())
    saved = read_checkpoint(tmp_path / "1.ckpt")
    assert torch.equal(saved["state_dict"]["layer.weight"], weight)
    assert torch.equal(saved["current_model_state"]["layer.weight"], record.steps[-1])


def test_an_exception_in_validation_leaves_the_weights_of_training(train, make_line):
    class Break(Callback):
        def on_validation_batch_end(self, *_):
            raise RuntimeError("broken")

    module, record = make_line(), Record()
    with pytest.raises(RuntimeError, match="broken"):
        train(WeightAveraging(), record, Break(), module=module)
    assert torch.equal(module.layer.weight, record.steps[-1])


def test_a_second_fit_begins_a_new_average(train):
    averaging = WeightAveraging()
    train(averaging)
    record, weight = train(averaging)
    assert torch.allclose(weight, torch.stack(record.steps).mean(0))


def test_the_trainer_is_not_copied_with_the_module(train):
    class Unique(Callback):
        def __deepcopy__(self, memo):
            raise AssertionError("copied")

    train(WeightAveraging(), Unique())


def test_all_ranks_have_the_average_of_one_device(fit, make_line, averaging, tmp_path):
    class Compare(Callback):
        def on_validation_batch_start(self, trainer, module, *_):
            weights = module.all_gather(module.layer.weight.detach())
            assert torch.equal(weights[0], weights[1])
            torch.save(weights[0].cpu(), tmp_path / f"validated-{trainer.global_rank}.pt")

    def train(**options):
        module = make_line()
        callbacks = [EMAWeightAveraging(decay=0.5), Compare()] if options else EMAWeightAveraging(decay=0.5)
        batches = {"limit_train_batches": 3, "num_sanity_val_steps": 0}
        fit(callbacks, module=module, **batches, **options)
        return module.layer.weight

    weight = train(devices=2, strategy=averaging())
    assert torch.equal(torch.load(tmp_path / "validated-1.pt", weights_only=True), weight)
    assert torch.load(tmp_path / "validated-0.pt", weights_only=True).norm() > 0.1


def test_the_average_can_be_kept_on_another_device(train):
    record, weight = train(WeightAveraging(device="cpu"))
    assert torch.allclose(weight, torch.stack(record.steps).mean(0))


def test_it_can_be_pickled(train):
    averaging = pickle.loads(pickle.dumps(EMAWeightAveraging(decay=0.5)))
    record, weight = train(averaging)
    assert torch.allclose(weight, ema(record.steps, 0.5))
    pickle.loads(pickle.dumps(averaging))


def test_a_strategy_that_does_not_say_where_its_weights_are_is_a_conflict(train, averaging):
    class Sharding(averaging):
        replicates_state = False

    with pytest.raises(ConflictError, match=r"WeightAveraging cannot average the weights: Sharding does not say which"):
        train(WeightAveraging(), devices=1, strategy=Sharding())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EMAWeightAveraging(decay=1.5), r"decay=1.5 must be between 0 and 1"),
        (lambda: EMAWeightAveraging(update_every_n_steps=0), r"update_every_n_steps=0 must be an int of at least 1"),
        (lambda: WeightAveraging(avg_fn=len, multi_avg_fn=len), r"avg_fn and multi_avg_fn are both passed"),
    ],
)
def test_arguments_out_of_range_are_refused(make, message):
    with pytest.raises(RequestError, match=message):
        make()


def test_an_argument_that_is_none_is_refused():
    with pytest.raises(MisuseError, match="WeightAveraging"):
        WeightAveraging(strategy="fsdp")
