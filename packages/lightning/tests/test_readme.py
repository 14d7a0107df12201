"""The tables of the README: complete, and true."""

from __future__ import annotations

import datetime as dt
import importlib
import inspect
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="this environment has no Lightning: nox -s neighbours has")

import torch

import dstrat
import dstrat_lightning
from dstrat.errors import DstratError
from dstrat_ddp import DDPStrategy
from dstrat_lightning.callbacks import _TRANSLATIONS, adapt_callback
from dstrat_lightning.module import adapt_module
from dstrat_lightning.strategy import strategy_class
from dstrat_lightning.trainer_view import TrainerView

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import net as nets  # noqa: E402

README = (HERE.parent / "README.md").read_text(encoding="utf-8")
pytestmark = pytest.mark.filterwarnings("ignore")


def row(beginning):
    """Return the row of a table that begins so."""
    (found,) = re.findall(rf"^\| {re.escape(beginning)}.*$", README, re.MULTILINE)
    return found


def code(text):
    return set(re.findall(r"`([^`]+)`", text))


@pytest.fixture(params=["lightning.pytorch", "pytorch_lightning"])
def library(request):
    return importlib.import_module(request.param)


def trainer(tmp_path, **options):
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    given = {"max_epochs": 2, "logger": False, "default_root_dir": tmp_path, **off, **options}
    return dstrat.Trainer(accelerator="cpu", devices=1, **given)


# Callbacks


def callbacks(library):
    """Return Lightning's own callbacks that can be made, each by arguments with which it acts in two short epochs."""

    class Finetuning(library.callbacks.BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.layers[0])

        def finetune_function(self, pl_module, epoch, optimizer):
            if epoch == 1:
                self.unfreeze_and_add_param_group(pl_module.layers[0], optimizer)

    return {
        "BackboneFinetuning": lambda c: c(1, verbose=False),
        "BaseFinetuning": lambda _: Finetuning(),
        "BatchSizeFinder": lambda c: c(steps_per_trial=1, max_trials=2),
        "EMAWeightAveraging": lambda c: c(),
        "EarlyStopping": lambda c: c("val_loss"),
        "GradientAccumulationScheduler": lambda c: c({0: 2}),
        "LearningRateFinder": lambda c: c(num_training_steps=5),
        "ModelCheckpoint": lambda c: c(monitor="val_loss"),
        "ModelPruning": lambda c: c("l1_unstructured", amount=0.5, verbose=0),
        "OnExceptionCheckpoint": lambda c: c("broken"),
        "SpikeDetection": lambda c: c(warmup=100),
        "StochasticWeightAveraging": lambda c: c(0.05, swa_epoch_start=1),
        "ThroughputMonitor": lambda c: c(lambda batch: len(batch[0]), window_size=4),
        "WeightAveraging": lambda c: c(),
    }


def names_of_callbacks(library):
    bases = {"Callback", "Checkpoint", "ProgressBar", "BasePredictionWriter"}
    return [
        name
        for name in library.callbacks.__all__
        if inspect.isclass(getattr(library.callbacks, name)) and name not in bases
    ]


def test_the_readme_names_the_callbacks_in_whose_place_dstrats_run(library):
    listed = code("`" + row("Lightning's own callbacks").partition("for `")[2].partition("dstrat's run")[0])
    bars = {name for name in names_of_callbacks(library) if name.endswith(("ProgressBar", "Summary"))}
    translated = {name.partition(":")[2] for name in _TRANSLATIONS}
    assert listed == translated - bars


def test_every_callback_of_lightning_runs(library, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    net, data, _ = nets.classes(library)

    class Net(net):
        def __init__(self):
            super().__init__()
            self.backbone, self.batch_size = self.layers[0], 8

        def train_dataloader(self):
            return torch.utils.data.DataLoader(self.dataset, batch_size=self.batch_size, shuffle=True)

        def setup(self, stage):
            holder = data()
            holder.setup(stage)
            self.dataset = holder.dataset

        def val_dataloader(self):
            return torch.utils.data.DataLoader(self.dataset, batch_size=8)

        def configure_optimizers(self):
            return torch.optim.SGD(
                [weights for weights in self.parameters() if weights.requires_grad], lr=self.hparams.lr
            )

    made, broken = callbacks(library), {}
    for name in names_of_callbacks(library):
        callback = made.get(name, lambda c: c())(getattr(library.callbacks, name))
        options = {
            "logger": dstrat.CSVLogger(tmp_path / name),
            "enable_checkpointing": isinstance(callback, library.callbacks.Checkpoint),
            "enable_progress_bar": "ProgressBar" in name,
            "enable_model_summary": "Summary" in name,
        }
        try:
            trainer(tmp_path, callbacks=[callback], log_every_n_steps=1, **options).fit(Net())
        except Exception as error:
            broken[name] = repr(error)
    assert broken == {}


OTHER_ARGUMENTS = {
    "ModelCheckpoint": {
        "dirpath": "elsewhere",
        "filename": "{step}",
        "monitor": "val_loss",
        "verbose": True,
        "save_last": True,
        "save_top_k": 0,
        "save_on_exception": True,
        "save_weights_only": True,
        "mode": "max",
        "auto_insert_metric_name": False,
        "every_n_train_steps": 7,
        "train_time_interval": dt.timedelta(minutes=1),
        "every_n_epochs": 3,
        "save_on_train_epoch_end": True,
        "enable_version_counter": False,
    },
    "Timer": {"duration": {"minutes": 1}, "interval": "epoch", "verbose": False},
    "ThroughputMonitor": {"batch_size_fn": max, "length_fn": len},
    "LearningRateMonitor": {"logging_interval": "epoch", "log_momentum": True, "log_weight_decay": True},
    "DeviceStatsMonitor": {"cpu_stats": True},
    "ModelSummary": {"max_depth": 3},
    "RichModelSummary": {"max_depth": 3},
    "TQDMProgressBar": {"refresh_rate": 7, "process_position": 2, "leave": True},
    "RichProgressBar": {"refresh_rate": 7, "leave": True, "theme": "another", "console_kwargs": {"width": 30}},
    "GradientAccumulationScheduler": {"scheduling": {0: 5}},
    "StochasticWeightAveraging": {
        "swa_lrs": 0.1,
        "swa_epoch_start": 2,
        "annealing_epochs": 3,
        "annealing_strategy": "linear",
        "avg_fn": min,
        "device": None,
    },
    "BatchSizeFinder": {
        "mode": "binsearch",
        "steps_per_trial": 5,
        "init_val": 4,
        "max_trials": 3,
        "batch_arg_name": "size",
        "margin": 0.2,
        "max_val": 64,
    },
    "LearningRateFinder": {
        "min_lr": 1e-5,
        "max_lr": 0.1,
        "num_training_steps": 5,
        "mode": "linear",
        "early_stop_threshold": None,
        "update_attr": False,
        "attr_name": "rate",
    },
}
"""Of each callback in whose place dstrat's runs: arguments that are not the defaults."""

REQUIRED = {
    "GradientAccumulationScheduler": {"scheduling": {0: 2}},
    "StochasticWeightAveraging": {"swa_lrs": 0.05},
    "ThroughputMonitor": {"batch_size_fn": len},
    "ModelCheckpoint": {"filename": "{epoch}"},
}


def plain(value):
    """Return a value as texts and containers, which can be compared."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [plain(item) for item in value]
    return (
        repr(value)
        if isinstance(value, str | int | float | bool | type(None)) or callable(value)
        else plain(state(value))
    )


def state(value):
    slots = [name for cls in type(value).__mro__ for name in getattr(cls, "__slots__", ())]
    return {
        **{name: getattr(value, name, None) for name in slots},
        **getattr(value, "__dict__", {"type": str(type(value))}),
    }


def test_arguments_of_a_translated_callback_count_or_are_listed(library):
    listed = code(row("arguments `TQDM").split("|")[1])
    dropped = set()
    for name, others in OTHER_ARGUMENTS.items():
        kind, required = getattr(library.callbacks, name), REQUIRED.get(name, {})
        signature = inspect.signature(kind.__init__)
        assert others.keys() == {n for n, p in signature.parameters.items() if p.kind != p.VAR_KEYWORD} - {"self"}, name
        usual = plain(state(adapt_callback(kind(**required))))
        for argument, value in others.items():
            if name == "ModelCheckpoint" and argument == "save_top_k":
                continue  # it needs a monitor, which needs a value
            try:
                made = plain(state(adapt_callback(kind(**{**required, argument: value}))))
            except DstratError:
                continue  # it is refused
            if made == usual:
                dropped.add(f"{name}({argument})")
    assert dropped == listed


# The Trainer that a module and a callback see


def test_attributes_of_lightnings_trainer_are_there_or_listed(library, tmp_path):
    theirs = library.Trainer(accelerator="cpu", devices=1, logger=False, enable_checkpointing=False)
    view = TrainerView(trainer(tmp_path))
    missing = set()
    for name in dir(theirs):
        if not name.startswith("_"):
            try:
                getattr(view, name)
            except DstratError:
                pass  # it is there, in a run
            except AttributeError as error:
                if str(error).startswith("dstrat's Trainer has no attribute"):
                    missing.add(name)
    assert missing == code(row("`trainer.").split("|")[1].replace("trainer.", ""))


def test_members_of_a_module_that_stay_lightnings_are_listed(library):
    net, _, _ = nets.classes(library)
    module = adapt_module(net())
    package = library.__name__.partition(".")[0]
    stay = set()
    for name in dir(type(module)):
        home = next(cls for cls in type(module).__mro__ if name in vars(cls))
        is_moving = home.__name__ == "_DeviceDtypeModuleMixin"  # to, cuda and the like, which are nn.Module's
        if not name.startswith("_") and home.__module__.startswith(package + ".") and not is_moving:
            stay.add(name)
    of_lightning = code(row("members that stay Lightning's").partition("; of a data module")[0])
    assert stay == of_lightning


# What does not work


def test_objects_of_lightning_that_are_no_callbacks_or_loggers_are_refused(library, tmp_path):
    for options in (
        {"strategy": library.strategies.DDPStrategy()},
        {"plugins": [library.plugins.MixedPrecision("bf16-mixed", "cpu")]},
        {"profiler": library.profilers.SimpleProfiler()},
    ):
        with pytest.raises(DstratError):
            trainer(tmp_path, **options)
    with pytest.raises(DstratError):
        dstrat.Trainer(accelerator=library.accelerators.CPUAccelerator(), devices=1)


def test_a_module_that_dstrat_has_trained_is_refused_by_lightnings_trainer(library, tmp_path):
    net, data, _ = nets.classes(library)
    module = net()
    trainer(tmp_path).fit(module, data())
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with pytest.raises(AttributeError, match="is_running"):
        library.Trainer(accelerator="cpu", devices=1, max_epochs=1, **off).fit(module, data())


def test_a_folder_of_dstrat_is_not_loaded_by_lightnings_method(library, tmp_path):
    net, data, _ = nets.classes(library)
    made = trainer(tmp_path, plugins="portable")
    made.fit(net(), data())
    made.save_checkpoint(tmp_path / "saved")
    with pytest.raises(IsADirectoryError):
        net.load_from_checkpoint(tmp_path / "saved")
    assert isinstance(dstrat_lightning.load_from_checkpoint(net, tmp_path / "saved"), net)


def test_strategies_that_accumulate_by_themselves_are_refused_in_lightnings_trainer(library):
    class Accumulating(DDPStrategy):
        accumulates_gradients = True

    net, data, _ = nets.classes(library)
    dstrat.StrategyRegistry.register("accumulating", Accumulating, description="as DeepSpeed does")
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = strategy_class(library.__name__)("accumulating")
    try:
        made = library.Trainer(strategy=strategy, accelerator="cpu", devices=1, max_epochs=1, **off)
        with pytest.raises(DstratError, match=r"takes whole training steps.*use dstrat.Trainer"):
            made.fit(net(), data())
    finally:
        dstrat.StrategyRegistry.remove("accumulating")


def test_strategies_that_train_apart_are_refused_in_lightnings_trainer(library):
    net, data, _ = nets.classes(library)
    off = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    strategy = strategy_class(library.__name__)("diloco", start_method="fork")
    made = library.Trainer(strategy=strategy, accelerator="cpu", devices=2, max_epochs=1, **off)
    with pytest.raises(Exception, match=r"train different weights.*use dstrat.Trainer"):
        made.fit(net(), data())
