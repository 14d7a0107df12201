"""Strategies whose training step is compiled: one call consumes several batches and steps the optimizer."""

from __future__ import annotations

import logging
from inspect import signature

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dstrat import Callback, GradientAccumulationScheduler, Logger, ProgressBar, SingleDeviceStrategy, TrainModule
from dstrat.errors import ConflictError
from dstrat.interfaces.strategy import CompiledSteps
from dstrat.training.callbacks.throughput_monitor import ThroughputMonitor


class WholeSteps(SingleDeviceStrategy):
    """Takes ``batches`` batches in each call, and steps ``steps`` times in it."""

    def __init__(self, batches=4, steps=2):
        super().__init__()
        self.compiled = CompiledSteps(batches=batches, optimizer_steps=steps)

    def compiled_steps(self):
        return self.compiled

    def process_dataloader(self, dataloader):
        size = dataloader.batch_size * self.compiled.batches
        shuffles = isinstance(dataloader.sampler, torch.utils.data.RandomSampler)
        return DataLoader(dataloader.dataset, size, shuffle=shuffles, drop_last=True)

    def process_evaluation_dataloader(self, dataloader):
        return dataloader

    def training_step(self, batch, batch_idx):
        (optimizer,) = self.optimizers
        groups = zip(*(part.chunk(self.compiled.optimizer_steps) for part in batch), strict=True)
        losses = []
        for group in groups:
            optimizer.zero_grad()
            with self.module.capture_logs() as logs:
                loss = self.module.training_step(group, batch_idx)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
            for call in logs:
                self.module.log(call.name, call.value, **call.options)
        return torch.stack(losses)


class Noting(Callback):
    def __init__(self):
        self.indices, self.losses, self.validated = [], [], []

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
        self.indices.append(batch_idx)
        self.losses.extend((outputs["loss"] * trainer.accumulate_grad_batches).reshape(-1).tolist())

    def on_validation_start(self, trainer, module) -> None:
        self.validated.append(trainer.fit_loop.batches_seen)


def samples(count=96, *, batch_size=2, shuffle=False):
    inputs = torch.randn(count, 8, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size, shuffle=shuffle)


@pytest.fixture
def fit(quiet_trainer, make_line):
    def run(loader=None, *, strategy=None, module=None, val=None, ckpt_path=None, **options):
        torch.manual_seed(2)
        noting = Noting()
        callbacks = [noting, *options.pop("callbacks", [])]
        strategy = strategy or WholeSteps()
        compiled = strategy.compiled_steps() or CompiledSteps()
        accumulate = compiled.batches // compiled.optimizer_steps
        options = {"num_sanity_val_steps": 0, "max_epochs": 1, "accumulate_grad_batches": accumulate, **options}
        trainer = quiet_trainer(strategy=strategy, callbacks=callbacks, **options)
        module = module or make_line()
        trainer.fit(module, loader or samples(), val, ckpt_path=ckpt_path)
        return trainer, noting, module

    return run


def test_batches_steps_and_epochs_are_counted(fit):
    trainer, noting, _ = fit(max_epochs=2)  # 48 batches of 2 in an epoch, in calls of 4 batches and 2 steps
    assert trainer.global_step == 48
    assert trainer.fit_loop.batches_seen == 96
    assert trainer.num_training_batches == 48
    assert trainer.current_epoch == 2
    assert noting.indices == 2 * list(range(0, 48, 4))


def test_losses_are_those_of_separate_steps(fit):
    _, compiled, module = fit()
    _, separate, other = fit(samples(batch_size=4), strategy=SingleDeviceStrategy())
    assert compiled.losses == separate.losses
    assert torch.equal(module.layer.weight, other.layer.weight)


def test_logged_values_are_those_of_separate_steps(fit):
    compiled, _, _ = fit()
    separate, _, _ = fit(samples(batch_size=4), strategy=SingleDeviceStrategy())
    assert compiled.callback_metrics["loss"] == separate.callback_metrics["loss"]


@pytest.mark.parametrize(
    ("options", "batches"),
    [
        ({}, [48]),
        ({"val_check_interval": 10}, [12, 20, 32, 40]),
        ({"val_check_interval": 0.5}, [24, 48]),
        ({"check_val_every_n_epoch": None, "val_check_interval": 30, "max_epochs": 2}, [32, 60, 92]),
    ],
)
def test_validation_follows_the_call_that_reaches_it(fit, options, batches):
    _, noting, _ = fit(val=samples(), **options)
    assert noting.validated == batches


def test_limits_count_batches(fit, caplog):
    with caplog.at_level(logging.WARNING):
        trainer, _, _ = fit(limit_train_batches=10)
    assert trainer.fit_loop.batches_seen == 8
    assert "8 training batches rather than 10, as one call of the compiled step takes 4" in caplog.text
    assert fit(fast_dev_run=1)[0].fit_loop.batches_seen == 4


class WholeEvaluations(WholeSteps):
    """Evaluates four batches in each call too."""

    def process_evaluation_dataloader(self, dataloader):
        return DataLoader(dataloader.dataset, 4 * dataloader.batch_size, drop_last=True)

    def evaluation_batches_per_item(self):
        return 4


class Evaluations(Callback):
    def __init__(self):
        self.indices, self.counts = [], []

    def on_validation_batch_end(self, trainer, module, outputs, batch, batch_idx, dataloader_idx=0) -> None:
        self.indices.append(batch_idx)

    def on_validation_end(self, trainer, module) -> None:
        self.counts.append(trainer.run.evaluation_loop.current_batches)


@pytest.mark.parametrize(
    ("limit", "batches", "message"),
    [
        (None, 12, ""),
        (8, 8, ""),
        (0.5, 4, "limit_val_batches=0.5 lets validation run over 4 batches, as one call of the compiled step takes 4"),
        (7, 4, "limit_val_batches=7 lets validation run over 4 batches"),
        (1, 4, "limit_val_batches=1 lets validation run over 4 batches"),
    ],
)
def test_limits_of_evaluation_count_batches(fit, caplog, limit, batches, message):
    evaluations = Evaluations()
    with caplog.at_level(logging.WARNING):
        trainer, _, _ = fit(
            strategy=WholeEvaluations(), val=samples(26), limit_val_batches=limit, callbacks=[evaluations]
        )
    assert evaluations.indices == list(range(0, batches, 4))
    assert evaluations.counts == [[batches]] == [trainer.num_val_batches]
    assert message in caplog.text
    assert ("lets validation run" in caplog.text) == bool(message)


def test_sanity_checks_run_whole_calls(fit):
    evaluations = Evaluations()
    fit(strategy=WholeEvaluations(), val=samples(24), num_sanity_val_steps=2, callbacks=[evaluations])
    assert evaluations.counts == [[4], [12]]


def test_the_progress_bar_counts_evaluated_batches(fit, capsys):
    states = []

    class Counting(ProgressBar):
        refresh_rate = 6

        def _update(self, trainer):
            if trainer.is_evaluating and self._evaluation is not None:
                states.append((self._evaluation.now().done, self._evaluation.now().total))
            super()._update(trainer)

    fit(
        strategy=WholeEvaluations(),
        val=samples(32),
        callbacks=[Counting(refresh_seconds=0)],
        enable_progress_bar=True,
        limit_train_batches=4,
    )
    capsys.readouterr()
    assert [done for done, total in states if total == 16 and done] == [8, 12]  # of 4, 8, 12 and 16; every 6 batches


def test_the_estimate_of_steps_is_met(fit, make_line):
    class Estimating(type(make_line())):
        def configure_optimizers(self):
            self.estimate = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    trainer, _, module = fit(module=Estimating(), max_epochs=2)
    assert module.estimate == trainer.global_step == 48


def test_schedulers_step_after_the_call(fit, make_line):
    class Scheduled(type(make_line())):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            self.scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": self.scheduler, "interval": "step", "frequency": self.frequency},
            }

    module = Scheduled()
    module.frequency = 4
    fit(module=module)
    assert module.scheduler.last_epoch == 6  # of 24 steps
    module.frequency = 3
    with pytest.raises(ConflictError, match="StepLR is stepped every 3 optimizer steps, and WholeSteps takes 2"):
        fit(module=module)


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_fit_goes_on_in_the_middle_of_an_epoch(fit, tmp_path, shuffle):
    whole, noting, module = fit(samples(shuffle=shuffle), max_epochs=2)
    path = tmp_path / "checkpoint"

    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            if trainer.global_step == 30:
                trainer.save_checkpoint(path)

    fit(samples(shuffle=shuffle), max_epochs=2, callbacks=[Saves()])
    trainer, rest, other = fit(samples(shuffle=shuffle), max_epochs=2, ckpt_path=path)
    assert rest.losses == noting.losses[30:]
    assert torch.equal(module.layer.weight, other.layer.weight)
    assert trainer.fit_loop.batches_seen == whole.fit_loop.batches_seen == 96


def test_a_position_within_a_call_is_refused(fit, tmp_path):
    path = tmp_path / "checkpoint"

    class Saves(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx) -> None:
            if trainer.global_step == 3:
                trainer.save_checkpoint(path)

    fit(strategy=SingleDeviceStrategy(), callbacks=[Saves()])
    with pytest.raises(ConflictError, match="saved after 3 batches of an epoch, and one call of the compiled step"):
        fit(ckpt_path=path)


class WithHook(Callback):
    def on_after_backward(self, trainer, module) -> None:
        pass


def _manual(module):
    module.automatic_optimization = False


def _steps(module):
    module.optimizer_step = lambda *args: None


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (_manual, {}, "automatic_optimization=False: return the loss"),
        (_steps, {}, "Line.optimizer_step would never be called"),
        (None, {"callbacks": [WithHook()]}, "on_after_backward .* would never be called"),
        (None, {"detect_anomaly": True}, "detect_anomaly=True cannot look at values"),
        (None, {"max_steps": 5}, "max_steps=5 cannot be met, as WholeSteps takes 2 optimizer steps in one call"),
    ],
)
def test_what_runs_within_a_step_is_refused(fit, make_line, change, options, message):
    module = make_line()
    if change is not None:
        change(module)
    with pytest.raises(ConflictError, match=message):
        fit(module=module, **options)


def test_the_progress_bar_counts_batches(fit, capsys):
    updates = []

    class Counting(ProgressBar):
        refresh_rate = 10

        def _update(self, trainer):
            updates.append(trainer.fit_loop.batches_done)
            super()._update(trainer)

    trainer, _, _ = fit(callbacks=[Counting(refresh_seconds=0)], enable_progress_bar=True)
    assert [done for done in updates if 0 < done < 48] == [12, 20, 32, 40]
    printed = capsys.readouterr()
    assert "48/48" in printed.err + printed.out
    assert trainer.global_step == 24


class Rates(Logger):
    def __init__(self):
        self.rows = []

    def log_metrics(self, metrics, step):
        self.rows.append({name: value for name, value in metrics.items() if name.startswith("throughput/")})


def test_throughput_counts_the_batches_of_a_call(fit):
    rates = Rates()
    fit(callbacks=[ThroughputMonitor()], logger=rates, log_every_n_steps=4)
    rows = [row for row in rates.rows if row]
    assert len(rows) >= 4
    for row in rows:  # batches of two samples
        assert row["throughput/batches_per_sec"] == pytest.approx(row["throughput/samples_per_sec"] / 2)


def test_logs_are_captured_rather_than_kept(make_line):
    module = make_line()
    module.nested = make_line()
    with module.capture_logs() as logs:
        module.log("a", 1.0, prog_bar=True, batch_size=3)
        with module.capture_logs() as nested_logs:
            module.nested.log("d", 4.0)
        module.nested.log_dict({"b": 2.0})
    module.log("c", 3.0)
    module.nested.log("e", 5.0)
    assert [(call.name, call.value) for call in logs] == [("a", 1.0), ("b", 2.0)]
    assert [(call.name, call.value) for call in nested_logs] == [("d", 4.0)]
    defaults = {name: each.default for name, each in signature(TrainModule.log).parameters.items()}
    arguments = {"self": defaults["self"], "name": defaults["name"], "value": defaults["value"]}
    assert arguments | logs[0].options == defaults | {"prog_bar": True, "batch_size": 3}


def test_steps_that_calls_do_not_reach_are_not_resumed_from(fit, tmp_path):
    def loader():
        return samples(8 * 3, batch_size=8)  # an epoch of three steps on one device

    trainer, _, _ = fit(loader(), strategy=SingleDeviceStrategy())
    trainer.save_checkpoint(tmp_path / "checkpoint")
    with pytest.raises(ConflictError, match="after 3 optimizer steps, and WholeSteps takes 2 in one call"):
        fit(max_steps=40, max_epochs=9, ckpt_path=tmp_path / "checkpoint")


def test_an_epoch_that_is_over_is_resumed_from_whatever_its_number_of_batches(fit, tmp_path):
    class Saving(Callback):
        def on_validation_end(self, trainer, module) -> None:
            trainer.save_checkpoint(tmp_path / "checkpoint")

    def loader():
        return samples(50)  # 25 batches on one device, and 6 calls of 4

    fit(loader(), val=samples(), callbacks=[Saving()], strategy=SingleDeviceStrategy())
    trainer, noting, _ = fit(loader(), max_epochs=2, ckpt_path=tmp_path / "checkpoint")
    assert noting.indices == list(range(0, 24, 4))
    assert trainer.global_step == 25 + 12


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"gradient_clip_val": 1.0}, "without clipping, and gradient_clip_val=1.0"),
        ({"accumulate_grad_batches": 4}, "4 batches and 2 optimizer steps, .* accumulate_grad_batches=4"),
        (
            {"callbacks": [GradientAccumulationScheduler({0: 2})], "accumulate_grad_batches": 1},
            "GradientAccumulationScheduler conflicts with WholeSteps|accumulate_grad_batches=1",
        ),
    ],
)
def test_arguments_that_a_compiled_step_would_ignore_are_refused(fit, options, message):
    with pytest.raises(ConflictError, match=message):
        fit(**options)
