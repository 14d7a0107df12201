from __future__ import annotations

import csv

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, StepLR

from dstrat import Callback, CSVLogger, LearningRateMonitor
from dstrat.errors import MisuseError, RequestError


@pytest.fixture
def rates(fit, scripted, tmp_path):
    """Fits with a function that makes optimizers of a module; returns what was written, by step."""

    def rates_(make, *, monitor=None, **options):
        class Configured(scripted):
            def configure_optimizers(self):
                return make(self)

        logger = CSVLogger(tmp_path)
        options = {"log_every_n_steps": 1, "max_epochs": 2, "logger": logger} | options
        fit(monitor or LearningRateMonitor(), module=Configured(), validates=False, **options)
        with (logger.log_dir / "metrics.csv").open(newline="") as file:
            rows = [{k: v for k, v in row.items() if v and k not in ("epoch", "loss")} for row in csv.DictReader(file)]
        written = [{name: float(value) for name, value in row.items()} for row in rows if len(row) > 1]
        assert len({row["step"] for row in written}) == len(written)
        return {int(row.pop("step")): row for row in written}

    return rates_


def sgd(module, lr=1.0, **options):
    return torch.optim.SGD(module.parameters(), lr=lr, **options)


def with_scheduler(module, interval):
    optimizer = sgd(module)
    scheduler = {"scheduler": ExponentialLR(optimizer, 0.5), "interval": interval}
    return {"optimizer": optimizer, "lr_scheduler": scheduler}


def test_a_rate_is_written_with_the_step_that_uses_it(rates):
    monitor = LearningRateMonitor()
    written = rates(lambda module: with_scheduler(module, "step"), monitor=monitor)
    assert written == {1: {"lr-SGD": 1.0}, 2: {"lr-SGD": 0.5}, 3: {"lr-SGD": 0.25}, 4: {"lr-SGD": 0.125}}
    assert monitor.lrs == {"lr-SGD": [1.0, 0.5, 0.25, 0.125]}


def test_only_steps_that_the_loggers_write_are_written(rates):
    written = rates(lambda module: with_scheduler(module, "step"), log_every_n_steps=3, max_epochs=4)
    assert written == {3: {"lr-SGD": 0.25}, 6: {"lr-SGD": 2.0**-5}}


class SavesWithin(Callback):
    """Saves between the batches of the second step."""

    def __init__(self, path):
        self.path = path

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        if trainer.fit_loop.batches_seen == 3:
            trainer.save_checkpoint(self.path)


def test_a_run_that_resumes_within_a_step_does_not_write_its_rate_again(fit, tmp_path):
    options = {"accumulate_grad_batches": 2, "limit_train_batches": 6, "max_epochs": 1, "log_every_n_steps": 1}
    options |= {"logger": CSVLogger(tmp_path), "validates": False}
    whole, resumed = LearningRateMonitor(), LearningRateMonitor()
    fit([whole, SavesWithin(tmp_path / "saved")], **options)
    fit([resumed], ckpt_path=tmp_path / "saved", **options)
    assert len(whole.lrs["lr-SGD"]) == 3
    assert len(resumed.lrs["lr-SGD"]) == 1


def test_a_rate_of_the_last_step_before_an_epoch_is_written_once(fit, tmp_path):
    options = {"validates": False, "accumulate_grad_batches": 2, "limit_train_batches": 2, "max_epochs": 3}
    options |= {"log_every_n_steps": 2, "logger": CSVLogger(tmp_path)}
    whole, resumed = LearningRateMonitor(), LearningRateMonitor()
    fit([whole, SavesWithin(tmp_path / "saved")], **options)
    fit([resumed], ckpt_path=tmp_path / "saved", **options)
    assert (len(whole.lrs["lr-SGD"]), len(resumed.lrs["lr-SGD"])) == (2, 0)


@pytest.mark.parametrize("every", [1, 2, 3])
def test_rates_of_batches_with_several_steps_are_written_alike_after_a_resume(fit, scripted, tmp_path, every):
    class TwoSteps(scripted):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for _ in range(2):
                self.optimizers().step()

        def configure_optimizers(self):
            return sgd(self)

    def written(name, *callbacks, **more):
        logger = CSVLogger(tmp_path / name)
        options = {"validates": False, "limit_train_batches": 4, "max_epochs": 3, "log_every_n_steps": every}
        fit([LearningRateMonitor(), *callbacks], module=TwoSteps(), logger=logger, **options, **more)
        with (logger.log_dir / "metrics.csv").open(newline="") as file:
            return [int(row["step"]) for row in csv.DictReader(file) if row.get("lr-SGD")]

    whole = written("whole", SavesWithin(tmp_path / "saved"))  # after six steps
    resumed = written("resumed", ckpt_path=tmp_path / "saved")
    assert resumed == [step for step in whole if step > 6]
    assert len(resumed) > 2


def test_accumulated_batches_are_written_once(rates):
    written = rates(lambda module: with_scheduler(module, "step"), accumulate_grad_batches=2, limit_train_batches=4)
    assert written == {1: {"lr-SGD": 1.0}, 2: {"lr-SGD": 0.5}, 3: {"lr-SGD": 0.25}, 4: {"lr-SGD": 0.125}}


@pytest.mark.parametrize("monitor", [LearningRateMonitor(), LearningRateMonitor("epoch")])
def test_a_rate_that_changes_with_epochs_is_written_with_epochs(rates, monitor):
    written = rates(lambda module: with_scheduler(module, "epoch"), monitor=monitor)
    assert written == {0: {"lr-SGD": 1.0}, 2: {"lr-SGD": 0.5}}


def test_the_interval_can_be_chosen(rates):
    written = rates(lambda module: with_scheduler(module, "epoch"), monitor=LearningRateMonitor("step"))
    assert written == {1: {"lr-SGD": 1.0}, 2: {"lr-SGD": 1.0}, 3: {"lr-SGD": 0.5}, 4: {"lr-SGD": 0.5}}
    written = rates(lambda module: with_scheduler(module, "step"), monitor=LearningRateMonitor("epoch"))
    assert written == {0: {"lr-SGD": 1.0}, 2: {"lr-SGD": 0.25}}


def test_a_rate_without_scheduler_is_written_too(rates):
    assert rates(sgd) == {step: {"lr-SGD": 1.0} for step in (1, 2, 3, 4)}


def test_optimizers_and_groups_have_names_of_their_own(rates, scripted):
    def make(module):
        module.automatic_optimization = False
        module.training_step = lambda batch, batch_idx: [optimizer.step() for optimizer in module.optimizers()] and None
        w, b = module.layer.parameters()
        first = torch.optim.SGD([{"params": [w]}, {"params": [b], "lr": 0.5}], lr=1.0)
        second = torch.optim.SGD([{"params": [w], "name": "body"}, {"params": [b], "lr": 0.25}], lr=2.0)
        third = torch.optim.Adam([w], lr=3.0)
        named = {"scheduler": StepLR(third, 100), "interval": "step", "name": "rate"}
        return [first, second, third], [named]

    written = rates(make, limit_train_batches=1, max_epochs=1)
    assert list(written.values()) == [
        {
            "lr-SGD/pg1": 1.0,
            "lr-SGD/pg2": 0.5,
            "lr-SGD-1/body": 2.0,
            "lr-SGD-1/pg2": 0.25,
            "rate": 3.0,
        }
    ]


def test_two_groups_of_an_optimizer_with_one_name_are_an_error(rates):
    def make(module):
        return torch.optim.SGD([{"params": [one], "name": "body"} for one in module.layer.parameters()], lr=1.0)

    with pytest.raises(MisuseError, match="several parameter groups of SGD have the name 'body', by which Learn"):
        rates(make)


def test_two_schedulers_of_one_optimizer_are_one_rate(rates):
    def make(module):
        optimizer = sgd(module)
        steps = {"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step"}
        return [optimizer], [steps, {"scheduler": StepLR(optimizer, 100), "interval": "epoch"}]

    assert [(step, *names) for step, names in rates(make).items()] == [(step, "lr-SGD") for step in (1, 2, 3, 4)]


def test_momentum_and_weight_decay_are_written_where_asked_for(rates):
    monitor = LearningRateMonitor(log_momentum=True, log_weight_decay=True)
    written = rates(lambda module: sgd(module, momentum=0.9, weight_decay=0.1), monitor=monitor)
    assert written[1] == {"lr-SGD": 1.0, "lr-SGD-momentum": 0.9, "lr-SGD-weight_decay": 0.1}
    written = rates(lambda module: torch.optim.AdamW(module.parameters(), lr=1.0, betas=(0.8, 0.9)), monitor=monitor)
    assert written[1] == {"lr-AdamW": 1.0, "lr-AdamW-momentum": 0.8, "lr-AdamW-weight_decay": 0.01}


def test_only_rank_0_writes(rates, averaging, tmp_path):
    written = rates(lambda module: with_scheduler(module, "step"), devices=2, strategy=averaging(), max_epochs=1)
    assert written == {1: {"lr-SGD": 1.0}, 2: {"lr-SGD": 0.5}}
    assert len([*tmp_path.rglob("metrics.csv")]) == 1


def test_callbacks_know_the_latest_rates_in_every_process(rates, averaging):
    class Seeing(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            assert trainer.callback_metrics["lr-SGD"].item() == 0.5 ** (trainer.global_step - 1)

    callbacks = [LearningRateMonitor(), Seeing()]
    rates(lambda module: with_scheduler(module, "step"), monitor=callbacks, devices=2, strategy=averaging())


def test_without_a_logger_a_line_says_so(fit, caplog):
    fit(LearningRateMonitor(), validates=False)
    assert caplog.messages == ["LearningRateMonitor writes nothing, as the Trainer has no logger"]


def test_another_interval_is_refused():
    with pytest.raises(RequestError, match=r"logging_interval='batch' must be 'step', 'epoch' or None"):
        LearningRateMonitor("batch")


def test_a_rate_without_scheduler_is_written_in_epochs_without_a_written_step(rates):
    monitor = LearningRateMonitor()
    assert rates(sgd, monitor=monitor, log_every_n_steps=50) == {0: {"lr-SGD": 1.0}, 2: {"lr-SGD": 1.0}}
    assert monitor.lrs == {"lr-SGD": [1.0, 1.0]}
    assert list(rates(sgd, log_every_n_steps=2, max_epochs=3)) == [0, 2, 4, 6]


def test_a_group_that_a_callback_adds_is_written_too(rates):
    class Adding(LearningRateMonitor):
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 1:
                trainer.optimizers[0].add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 0.5})
            super().on_train_epoch_start(trainer, module)

    monitor = Adding()
    written = rates(sgd, monitor=monitor)
    both = {"lr-SGD/pg1": 1.0, "lr-SGD/pg2": 0.5}
    assert written == {1: {"lr-SGD": 1.0}, 2: {"lr-SGD": 1.0}, 3: both, 4: both}
    assert monitor.lrs == {"lr-SGD/pg1": [1.0] * 4, "lr-SGD/pg2": [0.5] * 2}
