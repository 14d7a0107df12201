"""Arguments of the Trainer that change how a whole run goes."""

from __future__ import annotations

import pytest
import torch
from tests.accelerators import ACCELERATOR
from torch import nn

from dstrat import Callback, EarlyStopping, ModelCheckpoint, Trainer
from dstrat.errors import AnomalyError, CheckpointError, ConflictError, RequestError


class Noting(Callback):
    """Notes the batches that each stage reads."""

    def __init__(self):
        self.read = {"train": 0, "validation": 0, "test": 0, "predict": 0}

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.read["train"] += 1

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.read["validation"] += 1

    def on_test_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.read["test"] += 1

    def on_predict_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0):
        self.read["predict"] += 1


@pytest.mark.parametrize(("given", "batches"), [(True, 1), (3, 3)])
def test_a_fast_dev_run_tries_a_few_batches_of_everything(tmp_path, line, loader, given, batches):
    noting = Noting()
    trainer = Trainer(
        accelerator=ACCELERATOR,
        devices=1,
        fast_dev_run=given,
        max_epochs=100,
        val_check_interval=0.5,
        callbacks=[noting, ModelCheckpoint(monitor="never logged")],
        default_root_dir=tmp_path,
    )
    trainer.fit(line, loader(), loader())
    trainer.test(line, loader())
    trainer.predict(line, loader())
    assert noting.read == dict.fromkeys(noting.read, batches)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("devices", [1, 2])
def test_a_fast_dev_run_tries_code_that_uses_loggers_and_checkpoints(tmp_path, line_class, loader, averaging, devices):
    class Using(line_class):
        def training_step(self, batch, batch_idx):
            self.logger.experiment.add_histogram("weights", self.layer.weight)
            self.logger.watch(self, log="all")
            self.logger.log_metrics({"a": 1.0}, 0)
            return super().training_step(batch, batch_idx)

    checkpoint = ModelCheckpoint(monitor="val_loss")
    options = {"fast_dev_run": True, "callbacks": checkpoint, "default_root_dir": tmp_path}
    strategy = "auto" if devices == 1 else averaging()
    trainer = Trainer(accelerator=ACCELERATOR, devices=devices, strategy=strategy, **options)
    trainer.fit(Using(), loader(), loader())
    assert trainer.checkpoint_callback is checkpoint
    assert (checkpoint.best_model_path, checkpoint.dirpath) == ("", None)
    assert len(trainer.loggers) == 1
    assert Trainer(accelerator="cpu", fast_dev_run=True, logger=False).loggers == []
    if devices == 1:
        with pytest.raises(CheckpointError, match="ckpt_path='best', and fast_dev_run=1 saves no checkpoints"):
            trainer.test(Using(), loader(), ckpt_path="best")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("limit", "batches"), [(0.5, 3), (2, 2), (0.0, 0), (None, 6)])
@pytest.mark.parametrize("stage", ["train", "validation", "test", "predict"])
def test_each_stage_has_its_limit(quiet_trainer, line, loader, stage, limit, batches):
    noting = Noting()
    name = {"validation": "val"}.get(stage, stage)
    trainer = quiet_trainer(callbacks=noting, max_epochs=1, num_sanity_val_steps=0, **{f"limit_{name}_batches": limit})
    trainer.fit(line, loader(), loader())
    trainer.test(line, loader())
    trainer.predict(line, loader())
    assert noting.read == dict.fromkeys(noting.read, 6) | {stage: batches} | (
        {"validation": 0} if noting.read["train"] == 0 else {}
    )


@pytest.mark.parametrize(("count", "batches"), [(0, 0), (3, 3), (-1, 6)])
def test_so_many_batches_are_tried_before_training(quiet_trainer, line_class, loader, count, batches):
    seen = []

    class Trying(line_class):
        def validation_step(self, batch, batch_idx):
            seen.append((self.trainer.sanity_checking, self.trainer.validating, self.trainer.training))

    trainer = quiet_trainer(num_sanity_val_steps=count, max_epochs=1)
    trainer.fit(Trying(), loader(), loader())
    assert seen == [(True, False, False)] * batches + [(False, True, False)] * 6


EVALUATION_HOOKS = ("model_eval", "start", "epoch_start", "batch_start", "batch_end", "epoch_end", "end", "model_train")


def seeing_gradients(line_class, purpose, strategy_state):
    """Returns a module that asserts in the step and all hooks of an evaluation whether there are gradients."""

    def see(self, *args):
        assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == strategy_state
        self.seen += 1

    hooks = {f"on_{purpose}_{name}": see for name in EVALUATION_HOOKS}
    return type("Seeing", (line_class,), {**hooks, f"{purpose}_step": see, "seen": 0})()


@pytest.mark.parametrize("inference_mode", [True, False])
@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_evaluation_with_its_hooks_is_in_inference_mode_unless_switched_off(
    quiet_trainer, line_class, loader, stage, inference_mode
):
    module = seeing_gradients(line_class, stage.replace("validate", "validation"), (inference_mode, False))
    trainer = quiet_trainer(inference_mode=inference_mode)
    getattr(trainer, stage)(module, loader(24))
    assert module.seen == 6 + 3 * 2


def test_a_strategy_may_keep_evaluation_out_of_inference_mode(quiet_trainer, line_class, loader, monkeypatch):
    trainer = quiet_trainer(inference_mode=True)
    monkeypatch.setattr(trainer.strategy, "allows_inference_mode", False)
    module = seeing_gradients(line_class, "validation", (False, False))
    trainer.validate(module, loader(24))
    assert module.seen == 6 + 3 * 2


def test_validation_within_a_fit_has_no_gradients_and_is_not_in_inference_mode(quiet_trainer, line_class, loader):
    module = seeing_gradients(line_class, "validation", (False, False))
    quiet_trainer(max_epochs=1, num_sanity_val_steps=1).fit(module, loader(), loader(24))
    assert module.seen == (6 + 3 * 1) + (6 + 3 * 2)


def test_a_tensor_kept_from_validation_can_be_trained_with(quiet_trainer, line_class, loader):
    class Keeping(line_class):
        def validation_step(self, batch, batch_idx):
            self.scale = self.layer(batch[0]).abs().mean()

        def training_step(self, batch, batch_idx):
            return self.loss(batch) * self.layer.weight.square().sum() * self.scale

    module = Keeping()
    before = module.layer.weight.detach().clone()
    quiet_trainer(max_epochs=1).fit(module, loader(), loader())
    assert not module.layer.weight.equal(before)


@pytest.mark.parametrize("value", [-1, 1.5, "yes"])
def test_a_fast_dev_run_of_something_else_is_an_error(value):
    with pytest.raises(RequestError, match=r"fast_dev_run=.* must be True, False, or a number of batches"):
        Trainer(accelerator="cpu", fast_dev_run=value)


def test_overfitting_reads_the_same_few_batches_in_their_order(quiet_trainer, line_class, loader):
    seen = []

    class Seeing(line_class):
        def training_step(self, batch, batch_idx):
            seen.append(batch[0][0, 0].item())
            return super().training_step(batch, batch_idx)

    quiet_trainer(overfit_batches=2).fit(Seeing(), loader(shuffle=True))
    expected = [batch[0][0, 0].item() for batch in loader()][:2]
    assert seen == pytest.approx(expected * 2)


def test_overfitting_a_limited_epoch_is_an_error(quiet_trainer):
    with pytest.raises(ConflictError, match=r"overfit_batches=2 limits training.*limit_val_batches=3 does too"):
        quiet_trainer(overfit_batches=2, limit_val_batches=3)


def test_barebones_switches_off_everything_beside_training(tmp_path, line, loader, capfd):
    trainer = Trainer(accelerator=ACCELERATOR, devices=1, barebones=True, max_epochs=1, default_root_dir=tmp_path)
    trainer.fit(line, loader(), loader())
    assert trainer.callbacks == trainer.loggers == []
    assert trainer.callback_metrics == {}
    assert list(tmp_path.iterdir()) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("option", "value"), [("enable_progress_bar", True), ("logger", True), ("log_every_n_steps", 10)]
)
def test_asking_for_what_barebones_switches_off_is_an_error(option, value):
    with pytest.raises(ConflictError, match=f"barebones=True .*{option}={value} was asked for"):
        Trainer(accelerator="cpu", barebones=True, **{option: value})


def test_loaders_are_asked_for_again_every_n_epochs(quiet_trainer, line_class, loader):
    asked = []

    class Asking(line_class):
        def train_dataloader(self):
            asked.append(("train", self.current_epoch))
            return loader(batch_size=8 if self.current_epoch < 2 else 24)

        def val_dataloader(self):
            asked.append(("val", self.current_epoch))
            return loader()

    trainer = quiet_trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2)
    trainer.fit(Asking())
    assert asked == [("val", 0), ("train", 0), ("train", 2), ("val", 2)]
    assert trainer.global_step == 6 + 6 + 2 + 2


def test_determinism_holds_during_the_run_alone(quiet_trainer, line_class, loader):
    class Seeing(line_class):
        def on_train_start(self):
            self.seen = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark

    module = Seeing()
    quiet_trainer(deterministic=True, benchmark=True, max_epochs=1).fit(module, loader())
    assert module.seen == (True, True)
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == (False, False)


@pytest.mark.parametrize("deterministic", [None, False, True, "warn"])
def test_determinism_may_warn_only(quiet_trainer, line_class, loader, deterministic):
    class Seeing(line_class):
        def on_train_start(self):
            self.seen = torch.get_deterministic_debug_mode()

    module = Seeing()
    quiet_trainer(deterministic=deterministic, max_epochs=1).fit(module, loader())
    assert module.seen == {"warn": 1, True: 2}.get(deterministic, 0)
    assert torch.get_deterministic_debug_mode() == 0


def test_determinism_of_another_kind_is_an_error(quiet_trainer):
    with pytest.raises(RequestError, match="deterministic='sometimes' must be True, False or 'warn'"):
        quiet_trainer(deterministic="sometimes")


def test_an_anomaly_names_the_module(quiet_trainer, line_class, loader):
    class Dividing(nn.Module):
        def forward(self, x):
            return x / torch.zeros(()) * 0

    class Broken(line_class):
        def __init__(self):
            super().__init__()
            self.inner = nn.Sequential(nn.Linear(8, 8), Dividing())

        def training_step(self, batch, batch_idx):
            return super().training_step((self.inner(batch[0]), batch[1]), batch_idx)

    with pytest.raises(AnomalyError, match=r"inner\.1.*epoch 0, batch 0, rank 0"):
        quiet_trainer(detect_anomaly=True).fit(Broken(), loader())


def test_a_profiler_measures_the_step_and_the_hooks(quiet_trainer, line, loader, capfd):
    quiet_trainer(profiler="simple", max_epochs=1, callbacks=EarlyStopping("loss")).fit(line, loader())
    table = capfd.readouterr().err
    for action in ("training_step", "backward", "optimizer_step", "next_batch", "EarlyStopping.on_train_epoch_end"):
        assert action in table


@pytest.mark.on_cpu  # which torch's SyncBatchNorm does not serve
def test_batch_norm_over_processes_needs_gpus(quiet_trainer, line_class, loader, averaging):
    class Normed(line_class):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(8)

    with pytest.raises(Exception, match="sync_batchnorm=True cannot work on the accelerator 'cpu'"):
        quiet_trainer(sync_batchnorm=True, strategy=averaging(), devices=2).fit(Normed(), loader())


def test_batch_norm_over_one_process_is_what_it_was(quiet_trainer, line, loader):
    quiet_trainer(sync_batchnorm=True, max_epochs=1).fit(line, loader())


def test_a_module_can_be_created_in_the_precision_of_the_run(quiet_trainer, line_class):
    with quiet_trainer(precision="bf16-true").init_module():
        assert line_class().layer.weight.dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32


def test_a_module_can_be_created_without_initial_values(quiet_trainer, line_class):
    calls = []

    class Initialized(line_class):
        def __init__(self):
            super().__init__()
            weight = torch.zeros(3)
            nn.init.constant_(weight, 1.0)
            calls.append(weight.tolist())

    with quiet_trainer().init_module(empty_init=True):
        Initialized()
    with quiet_trainer().init_module():
        Initialized()
    assert calls == [[0, 0, 0], [1, 1, 1]]


@pytest.mark.parametrize(("options", "expected"), [({}, 12), ({"max_steps": 5}, 5), ({"max_epochs": -1}, float("inf"))])
def test_the_number_of_steps_is_known_to_configure_optimizers(quiet_trainer, line_class, loader, options, expected):
    class Planning(line_class):
        def configure_optimizers(self):
            self.steps = self.trainer.estimated_stepping_batches
            self.trainer.should_stop = True
            return super().configure_optimizers()

    module = Planning()
    quiet_trainer(**options).fit(module, loader())
    assert module.steps == expected


def test_accumulation_counts_in_the_number_of_steps(quiet_trainer, line_class, loader):
    class Planning(line_class):
        def configure_optimizers(self):
            self.steps = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    module = Planning()
    trainer = quiet_trainer(accumulate_grad_batches=4)
    trainer.fit(module, loader())
    assert module.steps == trainer.global_step == 4


def test_callbacks_that_a_module_configures_replace_those_of_their_class(quiet_trainer, line_class, loader):
    own = EarlyStopping("loss", patience=7)

    class Configuring(line_class):
        def configure_callbacks(self):
            return [own, Noting()]

    trainer = quiet_trainer(max_epochs=1, callbacks=[EarlyStopping("other", patience=1)])
    trainer.fit(Configuring(), loader())
    assert [type(callback) for callback in trainer.callbacks].count(EarlyStopping) == 1
    assert own in trainer.callbacks


def test_a_module_may_compute_its_own_gradients(quiet_trainer, line_class, make_line, loader):
    class Doubling(line_class):
        def backward(self, loss):
            (2 * loss).backward()

    plain, doubled = make_line(lr=0.02), make_line(Doubling, lr=0.01)
    quiet_trainer().fit(plain, loader())
    quiet_trainer().fit(doubled, loader())
    torch.testing.assert_close(plain.layer.weight, doubled.layer.weight)


def test_testing_without_any_module_is_an_error(quiet_trainer, loader):
    with pytest.raises(TypeError, match="test needs a module: pass one, or call fit"):
        quiet_trainer().test(dataloaders=loader())


class Adapter(nn.Linear):
    """Merges its factor into its frozen weight in evaluation mode, as loralib does, and takes it out again."""

    def __init__(self):
        super().__init__(8, 1)
        self.weight.requires_grad_(False)
        self.factor, self.is_merged = nn.Parameter(torch.tensor(0.5)), False

    def train(self, mode=True):
        super().train(mode)
        if mode == self.is_merged:
            self.weight.data += -self.factor if mode else self.factor
            self.is_merged = not mode
        return self

    def forward(self, x):
        return super().forward(x) + (0 if self.is_merged else self.factor * x.sum(1, keepdim=True))


def test_a_layer_with_its_own_train_is_called_after_an_evaluation(quiet_trainer, line_class, loader):
    def trained(**loaders):
        torch.manual_seed(0)
        module = line_class()
        module.layer = Adapter()
        quiet_trainer(max_epochs=3).fit(module, loader(), **loaders)
        return module

    module, expected = trained(val_dataloaders=loader()), trained()
    assert not module.layer.is_merged
    assert float(module.layer.factor.detach()) != 0.5
    torch.testing.assert_close(module.state_dict(), expected.state_dict(), rtol=1e-5, atol=1e-6)


def test_frozen_layers_stay_in_evaluation_mode_after_one(quiet_trainer, line_class, loader):
    module = line_class()
    module.frozen = nn.Sequential(nn.Dropout()).eval()
    quiet_trainer(max_epochs=1).fit(module, loader(), loader())
    assert module.layer.training
    assert not any(layer.training for layer in module.frozen.modules())
