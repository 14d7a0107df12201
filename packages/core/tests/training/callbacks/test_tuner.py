from __future__ import annotations

import logging
import random
import re

import matplotlib as mpl
import pytest
import torch
from packages.core.tests.training.conftest import Averaging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import (
    BatchSizeFinder,
    Callback,
    DataModule,
    LearningRateFinder,
    ModelCheckpoint,
    Trainer,
    TrainModule,
    Tuner,
)
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.training.callbacks.learning_rate_finder import LearningRateCurve
from dstrat.training.callbacks.trial import TrialTrainer

pytestmark = pytest.mark.usefixtures("quick_collections")  # the finder of batch sizes makes several

DATA = torch.randn(48, 8, generator=torch.Generator().manual_seed(1))


class Net(TrainModule):
    """Makes its loaders by ``batch_size``; batches over ``memory`` samples ask for more memory than there is."""

    def __init__(self, lr=0.01, batch_size=48, memory=10**6):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1), nn.Dropout(0.1))
        self.lr, self.batch_size, self.memory, self.seen = lr, batch_size, memory, 0

    def training_step(self, batch, batch_idx):
        self.seen += 1
        if len(batch[0]) > self.memory:
            torch.empty(1 << 50)
        return (self.layers(batch[0]) - batch[0].sum(1, keepdim=True)).square().mean()

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def train_dataloader(self):
        return DataLoader(TensorDataset(DATA), self.batch_size, shuffle=True)

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)  # watches what no search validates
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss", "strict": False}}


class Saved(Net):
    """Takes its settings from hyperparameters."""

    def __init__(self, learning_rate=0.01, size=16):
        super().__init__()
        self.save_hyperparameters()
        del self.lr, self.batch_size

    def train_dataloader(self):
        return DataLoader(TensorDataset(DATA), self.hparams.size)

    val_dataloader = train_dataloader

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.learning_rate)


class Data(DataModule):
    def __init__(self):
        super().__init__()
        self.batch_size = 4

    def train_dataloader(self):
        return DataLoader(TensorDataset(DATA), self.batch_size)


def everything(trainer, module):
    """What a search must leave as it is."""
    states = {name: value.clone() for name, value in module.state_dict().items()}
    return states, module.seen, trainer.global_step, trainer.callback_metrics, random.getstate(), torch.get_rng_state()


def assert_same(one, other):
    assert one[0].keys() == other[0].keys()
    assert all(torch.equal(value, other[0][name]) for name, value in one[0].items())
    assert one[1:5] == other[1:5]
    assert torch.equal(one[5], other[5])


def loader():
    return DataLoader(TensorDataset(DATA), 8, shuffle=True, generator=torch.Generator().manual_seed(5))


def test_rates_grow_and_losses_are_smoothed_as_they_were_published(quiet_trainer):
    curve = Tuner(quiet_trainer()).lr_find(Net(), min_lr=1e-4, max_lr=1e-2, num_training=4, early_stop_threshold=None)
    assert curve.results["lr"] == pytest.approx([1e-4, 1e-4 * 100**0.5, 1e-4 * 100**0.75, 1e-2])
    assert len(curve.results["loss"]) == 4


def test_rates_may_grow_linearly(quiet_trainer):
    curve = Tuner(quiet_trainer()).lr_find(Net(), min_lr=0.01, max_lr=0.05, num_training=4, mode="linear")
    assert curve.results["lr"] == pytest.approx([0.01, 0.03, 0.04, 0.05])


def test_the_rate_at_which_the_loss_falls_most_steeply_is_set(quiet_trainer):
    module = Net()
    curve = Tuner(quiet_trainer()).lr_find(module, max_lr=0.1, num_training=60)
    assert module.lr == curve.suggestion()
    assert 1e-3 < module.lr < 0.1


def test_noise_at_tiny_rates_is_not_the_steepest_fall():
    curve = LearningRateCurve("exponential", 1e-8, 1.0, 81)
    curve.results["lr"] = [10 ** (step / 10 - 8) for step in range(81)]
    fall = [1 / (1 + (rate / 1e-2) ** 2) for rate in curve.results["lr"]]  # over the logarithm most steeply at 1e-2
    curve.results["loss"] = [loss + 1e-3 * (-1) ** step for step, loss in enumerate(fall)]
    assert curve.suggestion() == pytest.approx(1e-2, rel=0.5)


def test_what_was_found_is_shown_without_a_configuration_of_logging(quiet_trainer, caplog):
    with caplog.at_level(logging.WARNING):
        Tuner(quiet_trainer()).lr_find(Net(), max_lr=0.1, num_training=20)
        Tuner(quiet_trainer()).scale_batch_size(Net(), max_val=4)
    rate, size = caplog.messages
    assert re.fullmatch(r"lr of Net is [\d.e-]+ now, where the loss fell fastest in 20 steps", rate)
    assert size == "batch_size is 4 now"


def test_hyperparameters_get_what_was_found(quiet_trainer):
    module, tuner = Saved(), Tuner(quiet_trainer())
    curve = tuner.lr_find(module, max_lr=0.1, num_training=30)
    assert module.hparams.learning_rate == curve.suggestion()
    assert tuner.scale_batch_size(module, batch_arg_name="size") == module.hparams.size == 64


def test_nothing_is_set_unless_asked_for(quiet_trainer):
    module = Net()
    curve = Tuner(quiet_trainer()).lr_find(module, num_training=20, update_attr=False)
    assert module.lr == 0.01
    assert curve.suggestion() is not None


def test_a_search_that_diverges_ends(quiet_trainer, caplog):
    with caplog.at_level(logging.INFO):
        curve = Tuner(quiet_trainer()).lr_find(Net(), max_lr=1e6, num_training=200)
    assert len(curve.results["lr"]) < 200
    assert "the loss diverges" in caplog.text


def test_accumulated_batches_are_one_point(quiet_trainer):
    curve = Tuner(quiet_trainer(accumulate_grad_batches=3)).lr_find(Net(), num_training=5)
    assert len(curve.results["lr"]) == 5


def test_too_few_points_suggest_nothing(quiet_trainer, caplog):
    module = Net()
    assert Tuner(quiet_trainer()).lr_find(module, max_lr=1e-3, num_training=8).suggestion() is None
    assert module.lr == 0.01
    assert "8 steps were recorded, and the first 10 and the last 1 of them are skipped" in caplog.text


def test_a_curve_is_drawn_with_the_suggestion(quiet_trainer):
    mpl.use("agg")
    curve = Tuner(quiet_trainer()).lr_find(Net(), num_training=20)
    (axes,) = curve.plot(suggest=True).axes
    assert axes.get_xscale() == "log"
    assert [list(line.get_xdata()) for line in axes.lines] == [curve.results["lr"], [curve.suggestion()]]


def test_a_search_leaves_no_trace(quiet_trainer):
    trainer, module, data = quiet_trainer(), Net(), loader()
    before = everything(trainer, module)
    Tuner(trainer).lr_find(module, data, num_training=20, update_attr=False)
    Tuner(trainer).scale_batch_size(module, max_trials=2)
    assert_same(everything(trainer, module), before)
    assert next(iter(data))[0].equal(next(iter(loader()))[0])


@pytest.mark.parametrize("callback", [LearningRateFinder(update_attr=False, num_training_steps=20), BatchSizeFinder()])
def test_a_fit_after_a_search_is_as_one_without(quiet_trainer, callback):
    fits = []
    for callbacks in ([callback], []):
        torch.manual_seed(7)
        trainer, module = quiet_trainer(callbacks=callbacks, max_epochs=2), Net(batch_size=64)
        trainer.fit(module)
        fits.append(everything(trainer, module))
    assert_same(*fits)


def test_a_finder_sets_the_rate_before_the_fit(quiet_trainer):
    class First(Callback):
        def on_train_start(self, trainer, module):
            self.rate = trainer.optimizers[0].param_groups[0]["lr"]

    finder, first, module = LearningRateFinder(max_lr=0.1, num_training_steps=40), First(), Net()
    quiet_trainer(callbacks=[finder, first], max_epochs=1).fit(module)
    assert first.rate == module.lr == finder.optimal_lr.suggestion()


class Elastic(Averaging):
    is_elastic = True


@pytest.mark.parametrize("option", [{"elastic": True, "max_restarts": 1}, {"preemption_deadline": 60.0}])
def test_a_search_needs_no_checkpoints_where_the_fit_does(tmp_path, option):
    callbacks = [ModelCheckpoint(dirpath=tmp_path)]
    trainer = Trainer(accelerator="cpu", devices=2, strategy=Elastic(), callbacks=callbacks, **option)
    trial = TrialTrainer(trainer, Callback())
    assert (trial.elastic, trial.preemption_deadline) == (False, None)


def test_a_fit_that_goes_on_from_a_checkpoint_searches_nothing(quiet_trainer, tmp_path):
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(Net())
    trainer.save_checkpoint(tmp_path / "saved")
    finder = LearningRateFinder()
    quiet_trainer(callbacks=[finder], max_epochs=2).fit(Net(), ckpt_path=tmp_path / "saved")
    assert finder.optimal_lr is None


def test_a_finder_that_the_module_configures_is_sent_to_the_trainer(quiet_trainer):
    class Configured(Net):
        def configure_callbacks(self):
            return LearningRateFinder()

    with pytest.raises(RequestError, match="LearningRateFinder works before that: pass it to the Trainer"):
        quiet_trainer().fit(Configured())


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({}, 16),
        ({"mode": "binsearch", "margin": 0.0}, 20),
        ({"mode": "binsearch"}, 19),
        ({"init_val": 40}, 20),
        ({"max_trials": 2}, 4),
        ({"max_val": 10}, 10),
        ({"init_val": 3}, 12),
    ],
)
def test_the_largest_size_that_fits_is_found_and_set(quiet_trainer, options, size):
    module = Net(memory=20)
    assert Tuner(quiet_trainer()).scale_batch_size(module, **options) == module.batch_size == size


def test_the_search_ends_when_a_batch_has_all_data(quiet_trainer):
    assert Tuner(quiet_trainer()).scale_batch_size(Net()) == 64


def test_validation_has_a_size_of_its_own(quiet_trainer):
    assert Tuner(quiet_trainer()).scale_batch_size(Net(memory=10), method="validate") == 8


def test_the_size_of_a_data_module_is_searched(quiet_trainer):
    class WithoutData(Net):
        train_dataloader, val_dataloader = TrainModule.train_dataloader, TrainModule.val_dataloader

    data, module = Data(), WithoutData(memory=9)
    del module.batch_size
    assert Tuner(quiet_trainer()).scale_batch_size(module, datamodule=data) == data.batch_size == 8


def test_a_failure_that_is_not_about_memory_is_not_hidden(quiet_trainer):
    class Fails(Net):
        def training_step(self, batch, batch_idx):
            raise RuntimeError("what is this batch?")

    module = Fails()
    with pytest.raises(RuntimeError, match="what is this batch"):
        Tuner(quiet_trainer()).scale_batch_size(module)
    assert module.batch_size == 48


def test_a_size_without_any_that_fits_is_an_error(quiet_trainer):
    with pytest.raises(MisuseError, match="no batch size that was tried fits into memory, the last of them was 1"):
        Tuner(quiet_trainer()).scale_batch_size(Net(memory=0))


def test_with_fast_dev_run_nothing_is_searched(quiet_trainer, caplog):
    tuner = Tuner(quiet_trainer(fast_dev_run=True))
    assert tuner.lr_find(Net()) is tuner.scale_batch_size(Net()) is None
    assert "no learning rate is searched with fast_dev_run" in caplog.text


def test_what_cannot_be_searched_says_why(quiet_trainer):
    class Two(Net):
        automatic_optimization = False

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=self.lr) for part in (self.layers[0], self.layers[2])]

    class Other(Net):
        def __init__(self):
            super().__init__()
            del self.lr, self.batch_size

    class Odd(Net):
        def __deepcopy__(self, memo):
            raise TypeError("there is only one")

    tuner = Tuner(quiet_trainer())
    with pytest.raises(MisuseError, match="returned 2 optimizers, and the search for a learning rate needs one"):
        tuner.lr_find(Two())
    with pytest.raises(MisuseError, match="Other and its hparams have no 'lr' or 'learning_rate'"):
        tuner.lr_find(Other())
    with pytest.raises(MisuseError, match="neither Other nor a data module nor their hparams have 'batch_size'"):
        tuner.scale_batch_size(Other())
    with pytest.raises(MisuseError, match=r"Odd, which cannot be copied \(TypeError: there is only one\)"):
        tuner.lr_find(Odd())
    with pytest.raises(ConflictError, match="a loader was passed, whose batch size is fixed"):
        tuner.scale_batch_size(Net(), loader())
    with pytest.raises(MisuseError, match="method='test' has no learning rate"):
        tuner.lr_find(Net(), method="test")
    with pytest.raises(MisuseError, match="pass train_dataloaders"):
        tuner.lr_find(Net(), dataloaders=loader())


@pytest.mark.parametrize(
    "options", [{"mode": "random"}, {"min_lr": 0}, {"min_lr": 1, "max_lr": 0.1}, {"num_training_steps": 0}]
)
def test_a_range_that_is_not_possible_is_refused(options):
    with pytest.raises(RequestError):
        LearningRateFinder(**options)


@pytest.mark.parametrize(
    "options", [{"mode": "linear"}, {"margin": 1.0}, {"init_val": 0}, {"init_val": 9, "max_val": 8}, {"max_trials": 0}]
)
def test_a_search_of_sizes_that_is_not_possible_is_refused(options):
    with pytest.raises(RequestError):
        BatchSizeFinder(**options)
