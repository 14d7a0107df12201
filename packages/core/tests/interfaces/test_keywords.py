from __future__ import annotations

import functools
import inspect
import pickle

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dstrat import (
    Callback,
    CSVLogger,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
    SimpleProfiler,
    Trainer,
    TrainModule,
)
from dstrat.errors import MisuseError


class Mine(ModelCheckpoint):
    pass


class Bare(Callback):
    pass


class Open(Callback):
    def __init__(self, **options):
        self.options = options


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Trainer(max_epoch=2), "Trainer has no argument 'max_epoch': did you mean 'max_epochs'?"),
        (lambda: Trainer(gpus=2), "Trainer has no argument 'gpus': it is accelerator='gpu' with devices=..."),
        (
            lambda: Trainer(resume_from_checkpoint="x"),
            "Trainer has no argument 'resume_from_checkpoint': it is an argument of fit, ckpt_path=...",
        ),
        (lambda: Trainer(ckpt_path="x"), "Trainer has no argument 'ckpt_path': it is an argument of fit"),
        (lambda: Trainer(zzz=1), "Trainer has no argument 'zzz': help(Trainer) lists all"),
        (lambda: EarlyStopping("loss", patient=3), "EarlyStopping has no argument 'patient': did you mean 'patience'?"),
        (lambda: Mine(monitr="loss"), "Mine has no argument 'monitr': did you mean 'monitor'?"),
        (lambda: Mine(period=2), "Mine has no argument 'period': it is every_n_epochs"),
        (
            lambda: ModelCheckpoint(in_memory_every_n_steps=10),
            (
                "ModelCheckpoint has no argument 'in_memory_every_n_steps': it is "
                "InMemoryCheckpoint(every_n_train_steps=...)"
            ),
        ),
        (lambda: EMAWeightAveraging(decays=0.9), "EMAWeightAveraging has no argument 'decays': did you mean 'decay'?"),
        (lambda: CSVLogger(save_dirs="x"), "CSVLogger has no argument 'save_dirs': did you mean 'save_dir'?"),
        (lambda: SimpleProfiler(dir_path="x"), "SimpleProfiler has no argument 'dir_path': did you mean 'dirpath'?"),
        (lambda: Bare(x=1), "Bare has no argument 'x': it has none"),
        (lambda: Bare(1), "Bare takes no arguments, and got 1"),
    ],
)
def test_a_misspelled_or_retired_argument_gets_a_suggestion(make, message):
    with pytest.raises(MisuseError) as raised:
        make()
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("method", "argument", "message"),
    [
        ("fit", "train_dataloader", "did you mean 'train_dataloaders'?"),
        ("fit", "val_dataloader", "did you mean 'val_dataloaders'?"),
        ("fit", "resume_from_checkpoint", "it is ckpt_path"),
        ("validate", "val_dataloaders", "did you mean 'dataloaders'?"),
        ("test", "test_dataloaders", "did you mean 'dataloaders'?"),
        ("predict", "return_prediction", "did you mean 'return_predictions'?"),
    ],
)
def test_a_misspelled_argument_of_a_run_gets_a_suggestion(method, argument, message):
    trainer = Trainer(logger=False, enable_checkpointing=False)
    with pytest.raises(MisuseError) as raised:
        getattr(trainer, method)(None, **{argument: None})
    assert str(raised.value) == f"{method} has no argument {argument!r}: {message}"


def test_a_method_that_explains_arguments_has_its_signature():
    assert list(inspect.signature(Trainer.fit).parameters)[:3] == ["self", "model", "train_dataloaders"]


def test_arguments_stay_as_they_are():
    assert Open(anything=1).options == {"anything": 1}
    assert "monitor" in inspect.signature(Mine).parameters  # not those of a base class's __new__
    assert not inspect.signature(Bare).parameters
    assert pickle.loads(pickle.dumps(Mine(monitor="loss"))).monitor == "loss"


def verbose(init):
    @functools.wraps(init)
    def wrapper(self, *args, verbose=False, **kwargs):
        self.verbose = verbose
        init(self, *args, **kwargs)

    return wrapper


class Decorated(Callback):
    @verbose
    def __init__(self, size=1):
        self.size = size


def test_a_decorated_constructor_takes_the_arguments_of_its_decorator():
    made = Decorated(size=2, verbose=True)
    assert (made.size, made.verbose) == (2, True)
    assert "size" in inspect.signature(Decorated).parameters
    with pytest.raises(TypeError, match="sizes"):
        Decorated(sizes=2)


class Counted:
    def __new__(cls, start, *, step=1):
        made = super().__new__(cls)
        made.counts = start, step
        return made


class CountedCallback(Callback, Counted):
    pass


class SizedCallback(Callback, Counted):
    def __init__(self, start, *, step=1):
        self.size = start


def test_a_further_base_class_gets_the_arguments():
    assert CountedCallback(2, step=3).counts == (2, 3)
    assert (SizedCallback(2).counts, SizedCallback(2).size) == ((2, 1), 2)
    with pytest.raises(TypeError, match="steps"):
        CountedCallback(2, steps=3)
    with pytest.raises(MisuseError, match=r"SizedCallback has no argument 'steps': did you mean 'step'\?"):
        SizedCallback(2, steps=3)


class Logging(TrainModule):
    def __init__(self, **options):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.options = options

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch[0]).sum()
        self.log("loss", loss, **self.options)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class LoggingCallback(Callback):
    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.log("x", 1.0, progbar=True)


def fit(module, **options):
    off = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False)
    trainer = Trainer(accelerator="cpu", devices=1, max_steps=1, **off, **options)
    trainer.fit(module, DataLoader(TensorDataset(torch.ones(2, 1))))


def test_a_misspelled_option_of_log_gets_a_suggestion():
    with pytest.raises(TypeError, match=r"^log has no argument 'on_epochs': did you mean 'on_epoch'\?$"):
        fit(Logging(on_epochs=True))
    with pytest.raises(TypeError, match=r"^log has no argument 'progbar': did you mean 'prog_bar'\?$"):
        fit(Logging(), callbacks=LoggingCallback())


class Helped(Logging):
    @staticmethod
    def helper():
        pass

    @classmethod
    def made(cls, size=1):
        pass

    def plain():
        pass

    def training_step(self, batch, batch_idx):
        self.call()


def test_the_error_of_a_method_without_self_stays_and_is_handled():
    seen = []

    class Seeing(Callback):
        def on_exception(self, trainer, module, exception):
            seen.append(exception)

    for call in (Helped.helper, Helped.made, Helped.plain):
        module = Helped()
        module.call = lambda call=call: call(sizes=1)
        with pytest.raises(TypeError, match="argument 'sizes'") as raised:
            fit(module, callbacks=Seeing())
        assert seen.pop() is raised.value
