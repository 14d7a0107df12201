"""The order of the hooks, as a whole."""

from __future__ import annotations

import inspect

import pytest
import torch

from dstrat import Callback, DataModule, LambdaCallback
from dstrat.errors import MisuseError, RequestError
from dstrat.training.module.hooks import DataHooks, ModuleHooks

HOOKS = [
    name
    for owner in (DataHooks, ModuleHooks)
    for name, value in vars(owner).items()
    if inspect.isfunction(value) and not name.endswith("_dataloader")
] + [
    *["training_step", "validation_step", "test_step", "predict_step", "configure_optimizers", "backward"],
    *["optimizer_step", "optimizer_zero_grad", "configure_gradient_clipping"],
]


@pytest.fixture
def recorded(make_line):
    """A module that notes each hook before it does what the hook does."""

    def make(calls, base=None):
        def noting(name, original):
            def hook(self, *args, **named):
                calls.append(name)
                return original(self, *args, **named)

            return hook

        base = base or type(make_line())
        return make_line(type("Recorded", (base,), {name: noting(name, getattr(base, name)) for name in HOOKS}))

    return make


TRANSFER = ["on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer"]
START = ["configure_callbacks", "prepare_data", "setup", "configure_model"]


def evaluation(kind, batches):
    return [
        f"on_{kind}_model_eval",
        f"on_{kind}_start",
        f"on_{kind}_epoch_start",
        *[*TRANSFER, f"on_{kind}_batch_start", f"{kind}_step", f"on_{kind}_batch_end"] * batches,
        f"on_{kind}_epoch_end",
        f"on_{kind}_end",
        f"on_{kind}_model_train",
    ]


def test_the_order_of_a_fit(quiet_trainer, recorded, loader):
    calls = []
    quiet_trainer(max_epochs=1, limit_val_batches=1, accumulate_grad_batches=2).fit(
        recorded(calls), loader(24), loader(24)
    )
    backward = ["on_before_backward", "backward", "on_after_backward"]
    assert calls == [
        *START,
        "configure_optimizers",
        "on_fit_start",
        *evaluation("validation", 1),
        "on_train_start",
        "on_train_epoch_start",
        *TRANSFER,
        "on_train_batch_start",
        *["on_before_zero_grad", "optimizer_zero_grad", "training_step", *backward],
        "on_train_batch_end",
        *TRANSFER,
        "on_train_batch_start",
        *["optimizer_step", "training_step", *backward, "on_before_optimizer_step", "configure_gradient_clipping"],
        "on_train_batch_end",
        "on_validation_model_zero_grad",
        *evaluation("validation", 1),
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_the_order_of_manual_optimization(quiet_trainer, recorded, line_class, loader):
    class Manual(line_class):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            for optimizer in self.optimizers():
                optimizer.zero_grad()
                self.manual_backward(super().training_step(batch, batch_idx))
                optimizer.step()

        def configure_optimizers(self):
            return [super().configure_optimizers(), super().configure_optimizers()]

    calls = []
    quiet_trainer(max_epochs=1, limit_train_batches=1).fit(recorded(calls, Manual), loader(24))
    step = ["on_before_backward", "backward", "on_after_backward", "on_before_optimizer_step"]
    assert calls == [
        *START,
        "configure_optimizers",
        "on_fit_start",
        "on_train_start",
        "on_train_epoch_start",
        *TRANSFER,
        *["on_train_batch_start", "training_step", *step, *step, "on_train_batch_end"],
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


def test_the_order_of_a_fit_that_goes_on(quiet_trainer, recorded, line, loader, tmp_path):
    class Saving(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.save_checkpoint(tmp_path / "saved")
            trainer.should_stop = True

    quiet_trainer(callbacks=Saving()).fit(line, loader(24))
    calls = []
    quiet_trainer(max_epochs=1).fit(recorded(calls), loader(24), loader(24), ckpt_path=tmp_path / "saved")
    assert calls == [
        *START,
        *["on_load_checkpoint", "configure_optimizers", "on_fit_start", "on_train_start", "on_train_epoch_start"],
        *TRANSFER,
        *["on_train_batch_start", "optimizer_step", "on_before_zero_grad", "optimizer_zero_grad", "training_step"],
        *["on_before_backward", "backward", "on_after_backward"],
        *["on_before_optimizer_step", "configure_gradient_clipping", "on_train_batch_end"],
        "on_validation_model_zero_grad",
        *evaluation("validation", 2),
        "on_train_epoch_end",
        "on_train_end",
        "on_fit_end",
        "teardown",
    ]


@pytest.mark.parametrize(("method", "kind"), [("validate", "validation"), ("test", "test"), ("predict", "predict")])
def test_the_order_of_an_evaluation(quiet_trainer, recorded, loader, method, kind):
    calls = []
    getattr(quiet_trainer(), method)(recorded(calls), loader(24))
    assert calls == [*START, *evaluation(kind, 2), "teardown"]


def test_callbacks_come_before_the_module_and_those_that_save_come_last(quiet_trainer, make_line, loader):
    calls = []

    class Noting(Callback):
        def on_train_epoch_end(self, trainer, module):
            calls.append("callback")

    class Saving(Callback):
        runs_last = True

        def on_train_epoch_end(self, trainer, module):
            calls.append(("saving", float(trainer.callback_metrics["loss_epoch"]) > 0))

    class Module(type(make_line())):
        def on_train_epoch_end(self):
            calls.append("module")

    quiet_trainer(max_epochs=1, callbacks=[Saving(), Noting()]).fit(make_line(Module), loader())
    assert calls == ["callback", "module", ("saving", True)]


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_batch_end", "on_validation_end", "on_fit_end"])
def test_the_order_holds_in_every_hook(quiet_trainer, make_line, loader, hook):
    calls = []

    def noting(name):
        return lambda self, *args: calls.append(name)

    early, late = type("Early", (Callback,), {hook: noting("early")}), type("Late", (Callback,), {hook: noting("late")})
    late.runs_last = True
    module = make_line(type("Module", (type(make_line()),), {hook: noting("module")}))
    options = {"max_steps": 1, "num_sanity_val_steps": 0, "val_check_interval": 1}
    quiet_trainer(callbacks=[late(), early()], **options).fit(module, loader(), loader())
    assert calls == ["early", "module", "late"]


def test_a_hook_can_end_the_epoch(quiet_trainer, make_line, loader):
    class Leaving(type(make_line())):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 2 else None

    trainer = quiet_trainer()
    trainer.fit(make_line(Leaving), loader())
    assert trainer.global_step == 4


def test_a_callback_can_end_the_training(quiet_trainer, line, loader):
    class Enough(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 3

    trainer = quiet_trainer(callbacks=Enough())
    trainer.fit(line, loader())
    assert trainer.global_step == 4


def test_the_state_of_callbacks_comes_back_from_other_processes(quiet_trainer, line, loader, averaging):
    class Counting(Callback):
        count = 0

        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            self.count += 1

        def state_dict(self):
            return {"count": self.count}

        def load_state_dict(self, state_dict):
            self.count = state_dict["count"]

    counting = Counting()
    quiet_trainer(strategy=averaging(), devices=2, callbacks=counting).fit(line, loader(4))
    assert counting.count == 12


def test_what_a_module_learns_from_a_checkpoint_is_known_when_its_optimizers_are_made(
    quiet_trainer, line_class, loader, tmp_path
):
    class Grows(line_class):
        def __init__(self, words=1):
            super().__init__()
            self.words = torch.nn.Embedding(words, 2)

        def on_save_checkpoint(self, checkpoint):
            checkpoint["words"] = self.words.num_embeddings

        def on_load_checkpoint(self, checkpoint):
            self.words = torch.nn.Embedding(checkpoint["words"], 2)

        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) + self.words.weight.sum()

    class Saving(Callback):
        def on_train_end(self, trainer, module):
            trainer.save_checkpoint(tmp_path / "saved")

    quiet_trainer(max_epochs=1, callbacks=Saving()).fit(Grows(5), loader(24))
    module = Grows()
    quiet_trainer(max_epochs=2).fit(module, loader(24), ckpt_path=tmp_path / "saved")
    assert module.words.weight.shape == (5, 2)


def test_a_hook_that_is_none_is_as_if_it_were_not_defined(quiet_trainer, make_line, loader):
    base = type(make_line())
    names = [name for name in HOOKS if name not in ("training_step", "configure_optimizers", "predict_step")]
    trained, plain = make_line(), make_line()
    for name in names:
        setattr(trained, name, None)
    callback = LambdaCallback(on_train_start=None)
    callback.on_train_epoch_start = None
    data = DataModule()
    for name in [name for name in HOOKS if hasattr(data, name)]:
        setattr(data, name, None)
    data.train_dataloader, data.val_dataloader = loader, None
    options = {"max_epochs": 1, "gradient_clip_val": 0.1}
    quiet_trainer(callbacks=callback, **options).fit(trained, datamodule=data)
    quiet_trainer(**options).fit(plain, loader())
    assert torch.equal(trained.layer.weight, plain.layer.weight)

    class Without(base):
        training_step = None

    with pytest.raises(MisuseError, match="Without has no training_step: define"):
        quiet_trainer().fit(make_line(Without), loader())
    trained.predict_step = None
    with pytest.raises(MisuseError, match=r"^Line\.predict_step is None: define it, or leave it as it is$"):
        quiet_trainer().predict(trained, loader())


def test_a_validation_step_that_is_none_means_no_validation(quiet_trainer, make_line, loader):
    module = make_line()
    module.validation_step = None
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(module, loader(), loader())
    assert trainer.callback_metrics.keys() == {"loss", "loss_step", "loss_epoch"}


def outputs_of(quiet_trainer, module, loader, **arguments):
    seen = []

    class Watching(Callback):
        def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
            seen.append(outputs)

    module.on_train_batch_end = lambda outputs, batch, batch_idx: seen.append(outputs)
    quiet_trainer(callbacks=Watching(), max_steps=1, **arguments).fit(module, loader())
    return seen


def test_hooks_get_the_loss_in_a_dict_as_in_lightning(quiet_trainer, make_line, loader):
    class Line(type(make_line())):
        def training_step(self, batch, batch_idx):
            self.last = super().training_step(batch, batch_idx)
            return self.last

    module = make_line(Line)
    outputs = outputs_of(quiet_trainer, module, loader)
    assert outputs == [{"loss": module.last}] * 2
    assert outputs[0]["loss"].grad_fn is None


def test_hooks_get_the_loss_divided_by_the_batches_of_a_step_and_the_rest_as_it_is(quiet_trainer, make_line, loader):
    class Line(type(make_line())):
        def training_step(self, batch, batch_idx):
            self.last = super().training_step(batch, batch_idx)
            return {"loss": self.last, "more": 3}

    module = make_line(Line)
    outputs = outputs_of(quiet_trainer, module, loader, accumulate_grad_batches=2)
    assert len(outputs) == 4
    assert outputs[-1] == {"loss": module.last.detach() / 2, "more": 3}


def test_hooks_get_an_empty_dict_after_a_step_that_returned_none(quiet_trainer, make_line, loader):
    class Line(type(make_line())):
        def training_step(self, batch, batch_idx):
            return None

    assert outputs_of(quiet_trainer, make_line(Line), loader) == [{}] * 2


def test_callbacks_that_setup_adds_are_called(quiet_trainer, line_class, loader):
    calls = []

    def noting(name):
        hooks = ("setup", "on_fit_start", "on_train_start", "on_train_batch_end", "teardown")
        return LambdaCallback(**{hook: lambda *_, hook=hook: calls.append((name, hook)) for hook in hooks})

    class Adding(Callback):
        def setup(self, trainer, module, stage):
            trainer.callbacks.append(noting("of a callback"))

    class Module(line_class):
        def setup(self, stage):
            self.trainer.callbacks.append(noting("of the module"))

    quiet_trainer(max_epochs=1, limit_train_batches=1, callbacks=Adding()).fit(Module(), loader())
    names = ("of a callback", "of the module")
    hooks = ("setup", "on_fit_start", "on_train_start", "on_train_batch_end", "teardown")
    assert calls == [(name, hook) for hook in hooks for name in names]


def test_setup_adds_callbacks_only(quiet_trainer, line_class, loader):
    class Module(line_class):
        def setup(self, stage):
            self.trainer.callbacks.append("callback")

    with pytest.raises(RequestError, match=r"trainer\.callbacks='callback' is not a Callback"):
        quiet_trainer().fit(Module(), loader())
