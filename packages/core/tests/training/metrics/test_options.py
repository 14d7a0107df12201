from __future__ import annotations

import statistics

import pytest
import torch

from dstrat import CSVLogger
from dstrat.errors import MisuseError


@pytest.fixture
def test_with(quiet_trainer, make_line, loader):
    """Runs a test whose step is given, and returns its results."""

    def run(step, *, loaders=None, **hooks):
        module = make_line(type("Net", (type(make_line()),), {"test_step": step, **hooks}))
        return quiet_trainer().test(module, loader() if loaders is None else loaders)

    return run


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("avg", 2.5), ("MEAN", 2.5), (torch.mean, 2.5), (torch.sum, 15.0), (sum, 15.0),
        (torch.max, 5.0), (torch.amax, 5.0), (max, 5.0), (torch.min, 0.0), (torch.amin, 0.0), (min, 0.0),
    ],
)  # fmt: skip
def test_a_reduction_may_be_a_function(test_with, given, expected):
    assert test_with(lambda self, batch, idx: self.log("x", float(idx), reduce_fx=given)) == [{"x": expected}]


@pytest.mark.parametrize("given", [torch.median, statistics.mean, lambda values: values[0], ["mean"]])
def test_another_function_is_an_error(test_with, given):
    message = "reduce_fx .* of 'x' is not one of mean, sum, max, min: .*log a torchmetrics Metric, or compute the value"
    with pytest.raises(MisuseError, match=message):
        test_with(lambda self, batch, idx: self.log("x", 1.0, reduce_fx=given))


def test_options_that_change_are_an_error_that_names_both(test_with):
    def step(self, batch, batch_idx):
        self.log("x", 1.0, prog_bar=batch_idx > 2, reduce_fx="max" if batch_idx > 2 else "mean")

    message = (
        r"log\('x'\) was called with prog_bar=False, reduce_fx='mean' before, and now with prog_bar=True, "
        "reduce_fx='max': use the same options each time, or two names"
    )
    with pytest.raises(MisuseError, match=message):
        test_with(step)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_step": False, "on_epoch": False}, "would be lost: set one of them"),
        ({"enable_graph": True}, "what is logged has no gradients"),
        ({"rank_zero_only": True, "sync_dist": True}, "cannot reduce over all processes what only rank 0 logs"),
        ({"on_step": True, "sync_dist": True}, "works in training only"),
    ],
)
def test_options_that_contradict_are_an_error(test_with, options, message):
    with pytest.raises(MisuseError, match=message):
        test_with(lambda self, batch, idx: self.log("x", 1.0, **options))


def test_a_complex_number_is_refused(test_with):
    with pytest.raises(MisuseError, match=r"log\('x'\) got a complex tensor; log its real part"):
        test_with(lambda self, batch, idx: self.log("x", torch.tensor(1j)))


def test_log_dict_takes_a_mapping(test_with):
    with pytest.raises(MisuseError, match="log_dict got a float: give a dict of values, or use log"):
        test_with(lambda self, batch, idx: self.log_dict(1.0))


def test_several_loaders_have_a_value_each_or_one_over_all(test_with, loader):
    def step(self, batch, batch_idx, dataloader_idx):
        self.log("each", float(dataloader_idx))
        self.log("all", float(dataloader_idx), add_dataloader_idx=False)

    first, second = test_with(step, loaders=[loader(), loader(count=16)])  # of 48 and 16 samples
    assert first == {"each/dataloader_idx_0": 0.0, "all": 0.25}
    assert second == {"each/dataloader_idx_1": 1.0, "all": 0.25}


@pytest.mark.parametrize("devices", [1, 2])
def test_values_of_steps_and_epochs_end_with_the_index_of_their_loader(
    quiet_trainer, make_line, loader, averaging, devices
):
    class Logging(type(make_line())):
        def test_step(self, batch, batch_idx, dataloader_idx):
            self.log("both", float(dataloader_idx), on_step=True, on_epoch=True)
            self.log(f"only_{dataloader_idx}", 5.0, on_step=True, on_epoch=True, add_dataloader_idx=False)

        def on_test_epoch_end(self):
            self.log("end", 6.0)

    trainer = quiet_trainer(strategy=averaging() if devices > 1 else "auto", devices=devices)
    first, second = trainer.test(make_line(Logging), [loader(), loader(count=16)])
    assert first == {"both_epoch/dataloader_idx_0": 0.0, "only_0_epoch": 5.0, "end": 6.0}
    assert second == {"both_epoch/dataloader_idx_1": 1.0, "only_1_epoch": 5.0, "end": 6.0}
    names = {"both", "both_step", "both_epoch"}
    assert trainer.callback_metrics.keys() == {f"{name}/dataloader_idx_{idx}" for name in names for idx in (0, 1)} | {
        "end",
        *(f"only_{idx}{ending}" for ending in ("", "_step", "_epoch") for idx in (0, 1)),
    }


# Where it works


@pytest.mark.parametrize("hook", ["on_test_start", "on_test_epoch_start", "on_test_epoch_end"])
def test_around_the_steps_a_value_belongs_to_the_epoch(test_with, hook):
    assert test_with(lambda self, batch, idx: None, **{hook: lambda self: self.log("x", 3.0)}) == [{"x": 3.0}]


def test_around_the_steps_there_is_no_value_of_a_step(test_with):
    with pytest.raises(MisuseError, match=r"log\('x', on_step=True\) works in steps; here, use on_epoch=True"):
        test_with(lambda self, batch, idx: None, on_test_epoch_end=lambda self: self.log("x", 3.0, on_step=True))


def test_a_name_belongs_to_steps_or_to_the_epoch(test_with):
    with pytest.raises(
        MisuseError, match=r"log\('x'\) was called in a step before, now around the steps: use two names"
    ):
        test_with(
            lambda self, batch, idx: self.log("x", 1.0, on_epoch=True),
            on_test_epoch_end=lambda self: self.log("x", 1.0, on_epoch=True),
        )


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_start", "on_train_epoch_end", "on_train_batch_end"])
def test_hooks_of_training_can_log(quiet_trainer, make_line, loader, hook):
    module = make_line(type("Net", (type(make_line()),), {hook: lambda self, *_: self.log("x", 3.0, on_epoch=True)}))
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader())
    assert trainer.callback_metrics["x"] == 3.0


@pytest.mark.parametrize("hook", ["setup", "configure_optimizers", "on_fit_start", "on_train_end", "on_validation_end"])
def test_other_hooks_cannot(quiet_trainer, make_line, loader, hook):
    def log(self, *args):
        self.log("x", 3.0)
        return getattr(super(net, self), hook)(*args)

    net = type("Net", (type(make_line()),), {hook: log})
    message = r"log\('x'\) works from the start of training, validation or test .* and neither here nor in prediction"
    with pytest.raises(MisuseError, match=message):
        quiet_trainer(max_epochs=1).fit(make_line(net), loader(), loader())


def test_a_name_that_is_known_cannot_be_logged_after_the_epoch_either(test_with):
    with pytest.raises(MisuseError, match="neither here nor in prediction"):
        test_with(
            lambda self, batch, idx: None,
            on_test_epoch_end=lambda self: self.log("x", 1.0),
            on_test_end=lambda self: self.log("x", 1.0),
        )


def test_prediction_cannot(quiet_trainer, make_line, loader):
    class Net(type(make_line())):
        def predict_step(self, batch, batch_idx):
            self.log("x", 1.0)

    with pytest.raises(MisuseError, match="neither here nor in prediction"):
        quiet_trainer().predict(make_line(Net), loader())


@pytest.mark.parametrize("name", [3, None, ["a"]])
def test_a_name_that_is_no_text_is_an_error(test_with, name):
    with pytest.raises(MisuseError, match=r"log\(.*\): the name is of the type (int|NoneType|list): give a str"):
        test_with(lambda self, batch, idx: self.log(name, 1.0))


@pytest.mark.parametrize("name", ["step", "epoch"])
def test_a_name_that_loggers_write_themselves_is_an_error_where_there_are_some(
    quiet_trainer, line_class, loader, tmp_path, name
):
    class Naming(line_class):
        def training_step(self, batch, batch_idx):
            self.log(name, 5.0, prog_bar=True, **options)
            return super().training_step(batch, batch_idx)

    def fit(logger):
        quiet_trainer(logger=logger, max_epochs=1, log_every_n_steps=1).fit(Naming(), loader())

    options = {"logger": False}
    fit(CSVLogger(tmp_path))
    options = {}
    fit(False)
    with pytest.raises(MisuseError, match=rf"log\('{name}'\): loggers write the {name} with every value"):
        fit(CSVLogger(tmp_path))
    with pytest.raises(MisuseError, match="CSVLogger has a column 'step' of its own: give the value 'step' another"):
        CSVLogger(tmp_path).log_metrics({"step": 1.0}, 3)
