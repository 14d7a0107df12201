from __future__ import annotations

import logging

import pytest

from dstrat import Callback, DataModule, TrainModule
from dstrat.errors import MisuseError


def without(cls, name, **methods):
    """Returns a subclass without a hook, and with other methods."""
    return type("Net", (cls,), {name: None, **methods})


def step(self, batch, batch_idx):
    return self.loss(batch)


@pytest.mark.parametrize("name", ["validation_steps", "vaildation_step", "valid_step", "val_step"])
def test_a_misspelled_validation_step_is_an_error(quiet_trainer, line_class, loader, name):
    module = without(line_class, "validation_step", **{name: step})()
    message = rf"val loader, and Net has no validation_step \(did you mean it by Net\.{name}\?\); limit_val_batches=0"
    with pytest.raises(MisuseError, match=message):
        quiet_trainer().fit(module, loader(), loader())
    quiet_trainer(limit_val_batches=0).fit(module, loader(), loader())


def test_a_loader_without_a_step_is_logged(quiet_trainer, line_class, loader, caplog):
    module = without(line_class, "validation_step", shared_step=step)()
    quiet_trainer().fit(module, loader(), loader())
    assert "there is a val loader, and Net has no validation_step: the fit does not validate" in caplog.messages
    caplog.clear()
    quiet_trainer().fit(module, loader())
    assert not caplog.messages


@pytest.mark.parametrize("name", ["validate_step", "evaluation_step", "calibration_step", "validation_loss"])
def test_a_method_that_is_somewhat_like_validation_step_is_logged(quiet_trainer, line_class, loader, caplog, name):
    module = without(line_class, "validation_step", **{name: step})()
    quiet_trainer().fit(module, loader(), loader())
    meant = f"(did you mean it by Net.{name}?)"
    assert (
        f"there is a val loader, and Net has no validation_step {meant}: the fit does not validate" in caplog.messages
    )


@pytest.mark.parametrize("name", ["val_dataloder", "val_dataloaders", "valid_dataloader", "validation_dataloader"])
def test_a_misspelled_loader_of_validation_is_an_error(quiet_trainer, line, loader, name):
    class Data(DataModule):
        def train_dataloader(self):
            return loader()

    misspelled = type("Data", (Data,), {name: lambda self: loader()})
    with pytest.raises(MisuseError, match=rf"no val_dataloader \(did you mean it by Data\.{name}\?\)"):
        quiet_trainer().fit(line, datamodule=misspelled())
    quiet_trainer().fit(line, loader(), loader())


@pytest.mark.parametrize("name", ["make_dataloader", "get_dataloader", "build_dataloader"])
def test_a_helper_that_makes_loaders_is_no_error(quiet_trainer, line_class, loader, caplog, name):
    module = type("Net", (line_class,), {name: lambda self: loader()})()
    quiet_trainer().fit(module, loader())
    problem = f"Net has a validation_step, and there is no val_dataloader (did you mean it by Net.{name}?)"
    assert caplog.messages == [f"{problem}: the fit does not validate"]


def test_a_missing_step_names_the_method_that_was_meant(quiet_trainer, line_class, loader):
    module = without(line_class, "test_step", test_steps=step)()
    with pytest.raises(MisuseError, match=r"test_step.*did you mean it by Net\.test_steps\?"):
        quiet_trainer().test(module, loader())
    module = without(line_class, "training_step", train_step=step)()
    with pytest.raises(MisuseError, match=r"training_step.*did you mean it by Net\.train_step\?"):
        quiet_trainer().fit(module, loader())
    module = without(line_class, "configure_optimizers", configure_optimizer=step)()
    with pytest.raises(MisuseError, match=r"configure_optimizers.*did you mean it by Net\.configure_optimizer\?"):
        quiet_trainer().fit(module, loader())


def test_a_method_that_is_like_predict_step_is_logged(quiet_trainer, line_class, loader, caplog):
    methods = {"predict_step": TrainModule.predict_step, "predict_steps": step, "forward": lambda self, batch: batch}
    with caplog.at_level(logging.WARNING):
        quiet_trainer().predict(type("Net", (line_class,), methods)(), loader())
    problem = "Net has no predict_step (did you mean it by Net.predict_steps?)"
    assert caplog.messages == [f"{problem}: predictions are the results of forward"]


def test_other_misspelled_hooks_are_logged(quiet_trainer, line_class, loader, caplog):
    class Misspelled(line_class):
        def on_training_epoch_end(self):
            pass

        def on_message(self):
            pass

    class Counting(Callback):
        def on_train_epoch_ended(self, trainer, module):
            pass

    with caplog.at_level(logging.WARNING):
        quiet_trainer(callbacks=Counting()).fit(Misspelled(), loader())
    end = "is no hook, and is never called by the Trainer: did you mean on_train_epoch_end? Give it another name if not"
    assert caplog.messages == [
        f"Counting.on_train_epoch_ended {end}",
        f"Misspelled.on_training_epoch_end {end}",
    ]


@pytest.mark.parametrize("name", ["training_step", "validation_step"])
def test_a_step_that_takes_an_iterator_is_an_error(quiet_trainer, line_class, loader, name):
    def of_iterator(self, dataloader_iter):
        pass

    module = type("Net", (line_class,), {name: of_iterator})()
    with pytest.raises(MisuseError, match=rf"Net\.{name}\(self, dataloader_iter\) would get a batch, and no iterator"):
        quiet_trainer().fit(module, loader(), loader())


@pytest.mark.parametrize("is_manual", [False, True])
def test_a_step_that_requires_an_argument_it_does_not_get_is_an_error(quiet_trainer, line_class, loader, is_manual):
    def of_optimizer(self, batch, batch_idx, optimizer_idx):
        pass

    def of_validation(self, batch, batch_idx, dataloader_idx, stage):
        pass

    module = type("Net", (line_class,), {"training_step": of_optimizer, "automatic_optimization": not is_manual})()
    message = r"Net\.training_step requires optimizer_idx, and the Trainer passes batch, batch_idx: leave it out; with"
    with pytest.raises(MisuseError, match=message):
        quiet_trainer().fit(module, loader())
    module = type("Net", (line_class,), {"validation_step": of_validation})()
    message = r"Net\.validation_step requires stage, and the Trainer passes batch, batch_idx, dataloader_idx: leave"
    with pytest.raises(MisuseError, match=message):
        quiet_trainer().validate(module, loader())


def test_a_class_in_place_of_an_instance_is_an_error(quiet_trainer, line_class, line, loader):
    with pytest.raises(MisuseError, match=r"the class Line was passed as the module: pass an instance, Line\("):
        quiet_trainer().fit(line_class, loader())
    with pytest.raises(MisuseError, match=r"the class DataModule was passed as data: pass an instance, DataModule\("):
        quiet_trainer().fit(line, datamodule=DataModule)
    with pytest.raises(MisuseError, match=r"the train loader is the class DataLoader: pass an instance, DataLoader\("):
        quiet_trainer().fit(line, type(loader()))


class OfInstances:
    """A descriptor that a class does not have."""

    def __get__(self, instance, owner):
        if instance is None:
            raise RuntimeError("only an instance has it")
        return 1


def test_a_descriptor_of_the_class_is_not_read(quiet_trainer, line_class, loader):
    module = without(line_class, "validation_step", width=OfInstances())()
    quiet_trainer().fit(module, loader(), loader())
    assert module.width == 1


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_misspelled_hook_may_be_any_kind_of_method(quiet_trainer, line_class, loader, caplog, kind):
    module = type("Net", (line_class,), {"on_train_epoch_ended": kind(lambda *args: None)})()
    quiet_trainer().fit(module, loader())
    assert "Net.on_train_epoch_ended is no hook" in caplog.text
