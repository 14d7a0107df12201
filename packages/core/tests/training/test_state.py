"""What modules and callbacks can ask the Trainer."""

from __future__ import annotations

import pickle

import pytest
import torch
from tests.printed import without_gloo

from dstrat import (
    Callback,
    CSVLogger,
    EarlyStopping,
    ModelCheckpoint,
    ProgressBar,
    SingleDeviceStrategy,
    TorchPredictionWriter,
    TrainerFn,
    TrainerStatus,
)
from dstrat.data.combined_loader import leaves
from dstrat.errors import MisuseError
from dstrat.training.loggers.defaults import SilentLogger

STAGES = ("training", "validating", "testing", "predicting", "evaluating", "sanity_checking", "is_fitting")


class Asking(Callback):
    """Notes what the Trainer says in each stage."""

    def __init__(self):
        self.said = {}

    def note(self, stage, trainer):
        loaders = {
            name: len(list(leaves(loaders)))
            for name in ("val", "test", "predict")
            if (loaders := getattr(trainer, f"{name}_dataloaders")) is not None
        }
        counts = {
            name: count
            for name in ("val", "sanity_val", "test", "predict")
            if (count := getattr(trainer, f"num_{name}_batches"))
        }
        self.said[stage] = {name for name in STAGES if getattr(trainer, name)}, counts, loaders

    def setup(self, trainer, module, stage):
        self.note(f"setup of {stage}", trainer)

    def on_sanity_check_start(self, trainer, module):
        self.note("start of the sanity check", trainer)

    def on_sanity_check_end(self, trainer, module):
        self.note("end of the sanity check", trainer)

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        self.note("train", trainer)
        self.said["last batches"] = [*self.said.get("last batches", []), trainer.is_last_batch]

    def on_validation_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.note("sanity check" if trainer.sanity_checking else trainer.stage, trainer)

    def on_test_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.note("test", trainer)

    def on_predict_batch_start(self, trainer, module, batch, batch_idx, dataloader_idx=0):
        self.note("predict", trainer)


def test_each_stage_is_known_with_its_loaders(quiet_trainer, line_class, loader):
    class Several(line_class):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            pass

    asking, module = Asking(), Several()
    trainer = quiet_trainer(callbacks=asking, max_epochs=1, val_check_interval=3)
    assert not any(getattr(trainer, name) for name in STAGES if name != "is_fitting")
    trainer.fit(module, loader(), [loader(), loader(16)])
    assert not any(getattr(trainer, name) for name in STAGES if name != "is_fitting")
    assert trainer.num_training_batches == 6
    assert trainer.train_dataloader.batch_size == 8
    trainer.validate(module, loader())
    trainer.test(module, loader())
    trainer.predict(module, loader())
    none = {}
    sanity_check = {"sanity_checking", "is_fitting"}
    assert asking.said == {
        "setup of fit": ({"training", "is_fitting"}, {}, none),
        "start of the sanity check": (sanity_check, {}, none),
        "sanity check": (sanity_check, {"val": [6, 3], "sanity_val": [2, 2]}, none | {"val": 2}),
        "end of the sanity check": (
            {"sanity_checking", "is_fitting"},
            {"val": [6, 3], "sanity_val": [2, 2]},
            none | {"val": 2},
        ),
        "train": ({"training", "is_fitting"}, {"val": [6, 3]}, none | {"val": 2}),
        "fit": ({"validating", "evaluating", "is_fitting"}, {"val": [6, 3]}, none | {"val": 2}),
        "setup of validate": ({"validating", "evaluating"}, {}, none),
        "validate": ({"validating", "evaluating"}, {"val": [6]}, none | {"val": 1}),
        "setup of test": ({"testing", "evaluating"}, {}, none),
        "test": ({"testing", "evaluating"}, {"test": [6]}, none | {"test": 1}),
        "setup of predict": ({"predicting"}, {}, none),
        "predict": ({"predicting"}, {"predict": [6]}, none | {"predict": 1}),
        "last batches": [False] * 5 + [True],
    }


@pytest.mark.parametrize("num_sanity_val_steps", [0, 2])
def test_what_is_validated_is_known_before_the_first_validation(quiet_trainer, line, loader, num_sanity_val_steps):
    class Reading(Callback):
        def on_train_start(self, trainer, module):
            self.known = trainer.num_val_batches, trainer.val_dataloaders.batch_size, trainer.num_sanity_val_batches

    reading = Reading()
    trainer = quiet_trainer(callbacks=reading, max_epochs=1, num_sanity_val_steps=num_sanity_val_steps)
    trainer.fit(line, loader(), loader())
    assert reading.known == ([6], 8, [])


def test_the_parts_of_the_run_are_known(quiet_trainer, line_class, loader):
    class Knowing(line_class):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

        def on_train_start(self):
            trainer = self.trainer
            self.known = trainer.optimizers, trainer.lr_scheduler_configs, trainer.model, trainer.num_devices

    module, checkpoint = Knowing(), ModelCheckpoint(monitor="val_loss")
    stopping = [EarlyStopping("val_loss"), EarlyStopping("val_loss", mode="max")]
    trainer = quiet_trainer(callbacks=[checkpoint, *stopping], max_epochs=1)
    trainer.fit(module, loader(), loader())
    [optimizer], [config], model, num_devices = module.known
    assert (type(optimizer), type(config.scheduler)) == (torch.optim.SGD, torch.optim.lr_scheduler.StepLR)
    assert model is module
    assert num_devices == 1
    assert trainer.checkpoint_callback is checkpoint
    assert trainer.checkpoint_callbacks == [checkpoint]
    assert trainer.early_stopping_callback is stopping[0]
    assert trainer.early_stopping_callbacks == stopping
    assert quiet_trainer().early_stopping_callback is None
    assert (trainer.num_nodes, trainer.precision, trainer.accelerator) == (1, "32-true", trainer.strategy.accelerator)
    assert trainer.logger is None
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (1, 0, 0, 0)
    assert trainer.is_global_zero


def test_the_folder_of_logs_is_known_before_a_run_and_without_a_logger(quiet_trainer, line, loader, tmp_path):
    assert quiet_trainer().log_dir == tmp_path
    trainer = quiet_trainer(logger=[SilentLogger(), CSVLogger(tmp_path / "logs")], max_steps=1)
    assert trainer.log_dir == tmp_path / "logs" / "dstrat_logs" / "version_0"
    trainer.fit(line, loader())
    assert trainer.log_dir == tmp_path / "logs" / "dstrat_logs" / "version_0"


def test_what_was_asked_for_and_where_it_began_is_known(quiet_trainer, make_line, loader, tmp_path):
    bar, writer = ProgressBar(), TorchPredictionWriter(tmp_path / "predicted")
    trainer = quiet_trainer(callbacks=[writer, bar], max_time="00:01:00:00", gradient_clip_val=0.0, max_epochs=1)
    assert (trainer.progress_bar_callback, trainer.prediction_writer_callbacks) == (bar, [writer])
    assert (trainer.device_ids, trainer.max_time, trainer.gradient_clip_val) == ([0], "00:01:00:00", None)
    assert trainer.precision_plugin is trainer.strategy.precision_plugin
    assert not trainer.received_sigterm
    module = make_line()
    assert module.loggers == []
    trainer.fit(module, loader())
    trainer.save_checkpoint(tmp_path / "end")
    assert trainer.ckpt_path is None
    trainer.test(module, loader(), ckpt_path=tmp_path / "end")
    assert trainer.ckpt_path == str(tmp_path / "end")


def test_the_number_of_steps_is_known_only_in_a_fit_and_after_it(quiet_trainer, line, loader):
    trainer = quiet_trainer(max_epochs=1)
    with pytest.raises(MisuseError, match="estimated_stepping_batches is known during a fit"):
        _ = trainer.estimated_stepping_batches
    trainer.validate(line, loader(8))
    with pytest.raises(MisuseError, match="estimated_stepping_batches is known during a fit"):
        _ = trainer.estimated_stepping_batches
    trainer.fit(line, loader(8))
    steps = trainer.global_step
    trainer.validate(line, loader(8))
    assert trainer.estimated_stepping_batches == steps > 0


def test_something_is_printed_once_for_the_job(quiet_trainer, line_class, loader, averaging, capfd):
    class Printing(line_class):
        def on_train_start(self):
            self.trainer.print("so many ranks:", self.trainer.world_size, end="!\n", flush=True)

    quiet_trainer(strategy=averaging(), devices=2, max_epochs=1).fit(Printing(), loader())
    assert without_gloo(capfd.readouterr().out) == "so many ranks: 2!\n"


def test_a_module_can_leave_its_gradients_unsynchronised(quiet_trainer, line_class, loader):
    entered = []

    class Noting(SingleDeviceStrategy):
        def no_backward_sync(self):
            entered.append(self.module.batch)
            return super().no_backward_sync()

    class ByHand(line_class):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            self.batch = batch_idx
            optimizer = self.optimizers()
            with self.no_backward_sync(enabled=batch_idx == 1), optimizer.toggle_model(sync_grad=batch_idx != 2):
                self.manual_backward(self.loss(batch))
            optimizer.step()

    quiet_trainer(strategy=Noting(), max_epochs=1).fit(ByHand(), loader())
    assert entered == [1, 2]


def test_the_number_of_processes_is_known_before_they_start_and_after(quiet_trainer, averaging, line_class, loader):
    class Asking(line_class):
        def on_train_start(self):
            assert self.trainer.world_size == self.trainer.strategy.world_size == 2

        def prepare_data(self):
            assert self.trainer.world_size == 2

    trainer = quiet_trainer(strategy=averaging(), devices=2, max_steps=1)
    assert (trainer.world_size, trainer.num_devices, trainer.num_nodes, trainer.global_rank) == (2, 2, 1, 0)
    trainer.fit(Asking(), loader())
    assert trainer.world_size == 2


class Scheduled:
    """What a module needs for an optimizer with a state, and a scheduler."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=0.1)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


def test_optimizers_schedulers_and_the_modules_trainer_stay_after_the_fit(quiet_trainer, line_class, loader):
    class Module(Scheduled, line_class):
        pass

    module, trainer = Module(), quiet_trainer()
    assert (trainer.optimizers, trainer.lr_scheduler_configs, trainer.lightning_module) == ([], [], None)
    trainer.fit(module, loader())
    for _ in range(2):  # also after an evaluation
        (optimizer,), (config,) = trainer.optimizers, trainer.lr_scheduler_configs
        assert optimizer.state[module.layer.weight]["step"] == 12
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
        assert (module.optimizers(), module.lr_schedulers()) == (optimizer, config.scheduler)
        assert module.trainer is trainer
        assert trainer.lightning_module is module
        assert (module.current_epoch, module.global_step) == (2, 12)
        module.log("late", 1.0)  # of which nothing is kept
        trainer.test(module, loader())
        assert "late" not in trainer.callback_metrics
    assert "_trainer" in vars(module)
    assert pickle.loads(pickle.dumps(module.layer)).weight.shape == (1, 8)


@pytest.mark.parametrize("method", ["fork", "popen"])  # in a test, popen is replaced by fork
def test_optimizers_of_other_processes_have_ended_with_them(quiet_trainer, averaging, line_class, loader, method):
    class Module(Scheduled, line_class):
        def on_train_end(self):
            assert len(self.trainer.optimizers) == len(self.trainer.lr_scheduler_configs) == 1

    module, trainer = Module(), quiet_trainer(strategy=averaging(start_method=method), devices=2, max_steps=1)
    assert trainer.optimizers == []
    trainer.fit(module, loader())
    assert module.trainer is trainer
    message = r"the last fit ran in other processes \(start_method='fork'\), which have ended with their optimizers"
    for ask in (lambda: trainer.optimizers, lambda: trainer.lr_scheduler_configs, module.optimizers):
        with pytest.raises(MisuseError, match=message):
            ask()


def test_the_state_is_what_lightnings_users_read(quiet_trainer, line_class, loader):
    seen = []

    class Telling(line_class):
        def note(self, *args):
            state = self.trainer.state
            assert (state.status, state.finished, state.stopped) == (TrainerStatus.RUNNING, False, False)
            seen.append((str(state.fn), str(state.stage)))

        on_train_start = on_validation_start = on_test_start = on_predict_start = note

    trainer, module = quiet_trainer(max_epochs=1), Telling()
    assert (trainer.state.status, trainer.state.fn, trainer.state.stage) == ("initializing", None, None)
    trainer.fit(module, loader(), loader())
    assert (trainer.state.status, trainer.state.fn, trainer.state.stage) == ("finished", TrainerFn.FITTING, None)
    for stage in ("validate", "test", "predict"):
        getattr(trainer, stage)(module, loader())
        assert trainer.state.finished
        assert trainer.state.fn == stage
    fit = [("fit", stage) for stage in ("sanity_check", "train", "validate")]
    assert seen == [*fit, ("validate", "validate"), ("test", "test"), ("predict", "predict")]

    class Failing(line_class):
        def training_step(self, batch, batch_idx):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        (failing := quiet_trainer()).fit(Failing(), loader())
    assert failing.state.status == "interrupted"
    assert failing.state.stopped


def test_a_test_of_a_module_may_set_its_trainer(quiet_trainer, line_class):
    class Outer(line_class):
        def __init__(self):
            super().__init__()
            self.inner = line_class()

    module, trainer = Outer(), quiet_trainer(max_epochs=3)
    module.trainer = trainer
    assert module.trainer is module.inner.trainer is trainer
    module.trainer = None
    with pytest.raises(MisuseError, match="Outer is not attached to a Trainer"):
        _ = module.trainer


def test_limits_that_were_not_passed_are_all_batches(quiet_trainer):
    trainer = quiet_trainer(limit_test_batches=3)
    names = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
    assert [getattr(trainer, name) for name in (*names, "val_check_interval")] == [1.0, 1.0, 3, 1.0, 1.0]
    trainer.limit_val_batches = 0
    assert trainer.limit_val_batches == 0
