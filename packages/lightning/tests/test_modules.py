"""LightningModules, unchanged, in dstrat's Trainer: the same losses as by Lightning's."""

from __future__ import annotations

import copy
import importlib
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("lightning", reason="this environment has no Lightning: nox -s neighbours has")

import lightning.pytorch
import torch
from click.testing import CliRunner
from tests.warm_ranks import run_in_ranks
from torch.utils.data import DataLoader

import dstrat
import dstrat_lightning
from dstrat import CSVLogger
from dstrat.cli.main import commands
from dstrat.errors import MisuseError
from dstrat_lightning.trainer_view import TrainerView

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import net as nets  # noqa: E402

LIBRARIES = ["lightning.pytorch", "pytorch_lightning"]
pytestmark = pytest.mark.filterwarnings("ignore")


def run(tmp_path, which, strategy):
    """Train net.py by a Trainer, in ranks that torchrun might have started; return what global rank 0 wrote."""
    path = tmp_path / f"{which}-{strategy}.json"
    done = run_in_ranks(HERE / "net.py", which, strategy, str(path), devices=2)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


def run_as_users_do(tmp_path, which, strategy):
    """Train net.py by a Trainer that starts the other rank; return what global rank 0 wrote."""
    path = tmp_path / f"{which}-{strategy}.json"
    command = [sys.executable, "-W", "ignore", str(HERE / "net.py"), which, strategy, str(path)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """The losses of Lightning's own ddp on two ranks, with dropout, clipping and a data module."""
    return run_as_users_do(tmp_path_factory.mktemp("lightning"), "lightning", "ddp")


BESIDE_LIGHTNING = pytest.mark.xdist_group("beside lightning")  # tests that share its training


@BESIDE_LIGHTNING
@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.variant), "fsdp"])
def test_two_ranks_give_the_losses_of_lightning(tmp_path, reference, strategy):
    seen = run_as_users_do(tmp_path, "dstrat", strategy)
    assert seen["losses"] == pytest.approx(reference["losses"], abs=1e-6)
    assert seen["steps"] == reference["steps"]
    assert seen["best"].endswith(Path(reference["best"]).name)
    assert seen["score"] == pytest.approx(seen["val_losses"][0], abs=1e-6)


@BESIDE_LIGHTNING
@pytest.mark.parametrize("strategy", ["dstrat_ddp", "dstrat_fsdp"])
def test_lightnings_trainer_runs_strategies_of_dstrat(tmp_path, reference, strategy):
    start = run_as_users_do if strategy == "dstrat_ddp" else run
    seen = start(tmp_path, "lightning", strategy)
    assert seen["losses"] == pytest.approx(reference["losses"], abs=1e-5)
    assert seen["score"] == pytest.approx(reference["score"], abs=1e-5)


@pytest.fixture(params=LIBRARIES)
def library(request):
    return importlib.import_module(request.param)


@pytest.fixture
def make(library, tmp_path):
    """Return the classes of net.py of a library, and a quiet Trainer."""

    def trainer(**options):
        off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
        given = {"max_epochs": 1, "logger": False, "default_root_dir": tmp_path, **off, **options}
        return dstrat.Trainer(accelerator="cpu", devices=1, **given)

    net, data, _ = nets.classes(library)
    return net, data, trainer


def test_a_module_keeps_its_class_its_name_and_its_hyperparameters(make):
    net, data, trainer = make
    module = net(lr=0.02)
    trainer().fit(module, datamodule=data())
    assert type(module).__name__ == "Net"
    assert isinstance(module, net)
    assert isinstance(module, dstrat.TrainModule)
    assert module.hparams.lr == 0.02
    assert len(module.losses) == 8


def test_a_converted_module_is_copied_and_pickled(make):
    net, data, trainer = make
    module = net()
    trainer().fit(module, datamodule=data())
    again = copy.deepcopy(module)
    assert isinstance(again, net)
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))
    nets.Net = net  # pickle finds the user's class by its name
    other = pickle.loads(pickle.dumps(module))
    assert isinstance(other, dstrat.TrainModule)
    assert other.hparams.lr == module.hparams.lr


def test_hooks_that_call_super_reach_dstrats(make):
    net, data, trainer = make
    seen = []

    class Calling(net):
        def optimizer_step(self, *args, **kwargs):
            seen.append("optimizer_step")
            super().optimizer_step(*args, **kwargs)

        def on_train_epoch_end(self):
            super().on_train_epoch_end()
            seen.append(type(self.trainer).__name__)

    trainer().fit(Calling(), datamodule=data())
    assert seen == ["optimizer_step"] * 8 + ["TrainerView"]


def test_manual_optimization_counts_steps(make):
    net, data, trainer = make

    class Manual(net):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx):
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    made = trainer()
    made.fit(Manual(), datamodule=data())
    assert made.global_step == 8


def test_a_module_within_a_module_logs(library, make):
    net, data, trainer = make

    class Outer(net):
        def __init__(self):
            super().__init__()
            self.inner = net()

        def training_step(self, batch, batch_idx):
            self.inner.log("inner", 2.0)
            return super().training_step(batch, batch_idx) + 0 * self.inner(batch[0]).sum()

    made = trainer()
    made.fit(Outer(), datamodule=data())
    assert made.callback_metrics["inner"] == 2.0


@pytest.mark.parametrize("place", ["scheduler", "optimizer", "optimizer of a dict"])
def test_a_monitor_of_a_scheduler_that_takes_no_value_is_left_out(make, place):
    net, data, trainer = make

    class Monitored(net):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
            if place == "scheduler":
                return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
            config = scheduler if place == "optimizer" else {"scheduler": scheduler}
            return {"optimizer": optimizer, "lr_scheduler": config, "monitor": "val_loss"}

    trainer().fit(Monitored(), datamodule=data())


def test_callbacks_see_lightnings_values(library, make, tmp_path):
    net, data, trainer = make
    seen = {}

    class Watching(library.Callback):
        def on_train_start(self, trainer, pl_module):
            seen["limits"] = (trainer.limit_train_batches, trainer.num_training_batches, trainer.val_check_interval)
            seen["logger"] = trainer.logger
            seen["callbacks"] = trainer.callbacks
            seen["dir"] = trainer.default_root_dir
            seen["loop"] = (trainer.fit_loop.max_epochs, trainer.fit_loop.epoch_loop.global_step)

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            trainer.should_stop = batch_idx == 2

        def on_fit_end(self, trainer, pl_module):
            with pytest.raises(AttributeError, match="dstrat's Trainer has no attribute '_data_connector'"):
                _ = trainer._data_connector

    watching, logger = Watching(), library.loggers.CSVLogger(tmp_path / "logs")
    made = trainer(callbacks=[watching], logger=logger, log_every_n_steps=1)
    made.fit(net(), datamodule=data())
    assert made.global_step == 3
    assert seen["limits"] == (1.0, 8, 1.0)
    assert seen["logger"] is logger
    assert watching in seen["callbacks"]
    assert seen["dir"] == str(tmp_path)
    assert seen["loop"] == (1, 0)
    assert (Path(logger.log_dir) / "metrics.csv").exists()


def test_callbacks_that_a_module_configures_leave_those_of_other_classes(library, make):
    net, data, trainer = make
    seen = []

    class First(library.Callback):
        def on_train_start(self, trainer, pl_module):
            seen.append(type(self).__name__)

    class Second(First):
        pass

    class Configuring(net):
        def configure_callbacks(self):
            return [Second()]

    trainer(callbacks=[First(), Second()]).fit(Configuring(), datamodule=data())
    assert seen == ["First", "Second"]


def test_lightnings_early_stopping_ends_the_fit(library, make):
    net, data, trainer = make
    stopping = library.callbacks.EarlyStopping("val_loss", patience=1, min_delta=100.0)
    made = trainer(max_epochs=9, callbacks=stopping)
    made.fit(net(), datamodule=data())
    assert made.current_epoch == 2
    assert stopping.stopped_epoch == 1


def test_lightnings_model_checkpoint_knows_what_dstrat_saved(library, make, tmp_path):
    net, data, trainer = make
    best = library.callbacks.ModelCheckpoint(tmp_path / "best", monitor="val_loss", filename="{epoch}")
    made = trainer(max_epochs=2, callbacks=[best], enable_checkpointing=True, plugins="lightning")
    made.fit(net(), datamodule=data())
    assert Path(best.best_model_path).parent == tmp_path / "best"
    assert best.best_model_score <= made.callback_metrics["val_loss"]  # that of the last epoch
    loaded = net.load_from_checkpoint(best.best_model_path)  # of Lightning
    assert loaded.hparams.lr == 0.05


def test_a_changed_model_checkpoint_says_what_to_do(library, make):
    _, _, trainer = make

    class Mine(library.callbacks.ModelCheckpoint):
        def on_validation_end(self, trainer, pl_module):
            pass

    with pytest.raises(MisuseError, match=r"Mine changes on_validation_end of Lightning's ModelCheckpoint.*derive it"):
        trainer(callbacks=Mine(), enable_checkpointing=True)
    renaming = library.callbacks.ModelCheckpoint()
    renaming.CHECKPOINT_NAME_LAST = "{epoch}-last"
    with pytest.raises(MisuseError, match="another CHECKPOINT_NAME_LAST, and dstrat's runs in its place"):
        trainer(callbacks=renaming, enable_checkpointing=True)


def test_weights_are_averaged_by_the_function_of_lightnings_callback(library, make):
    net, data, trainer = make

    def first_weights(averaged, weights, count):
        return averaged

    averaging = library.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1, avg_fn=first_weights)
    plain = library.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=1)
    trained = []
    for callback in (averaging, plain):
        torch.manual_seed(0)
        module = net()
        trainer(max_epochs=4, callbacks=[callback]).fit(module, datamodule=data())
        trained.append(torch.cat([weights.detach().flatten() for weights in module.parameters()]))
    assert not torch.equal(*trained)


def test_predictions_are_written_by_a_writer_of_lightning(library, make):
    net, data, trainer = make
    written = {}

    class Writer(library.callbacks.BasePredictionWriter):
        def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
            written["indices"], written["count"] = batch_indices, len(predictions)

    module, datamodule = net(), data()
    datamodule.setup("predict")
    trainer(callbacks=Writer("epoch")).predict(module, datamodule.val_dataloader())
    assert written["count"] == 8
    assert written["indices"][0][0] == list(range(8))


@pytest.mark.parametrize("first", ["lightning", "dstrat"])
def test_each_goes_on_exactly_from_the_others_checkpoint(library, make, tmp_path, first):
    net, data, trainer = make
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}

    def made(which, epochs):
        if which == "lightning":
            return library.Trainer(accelerator="cpu", devices=1, max_epochs=epochs, **off)
        return trainer(max_epochs=epochs, plugins="lightning")

    def fit(which, epochs, ckpt_path=None):
        library.seed_everything(1, verbose=False)
        module = net(dropout=0.0)
        loader = nets.unshuffled(data())
        run = made(which, epochs)
        run.fit(module, loader, ckpt_path=ckpt_path)
        return module, run

    expected, _ = fit("lightning", 4)
    _, run = fit(first, 2)
    run.save_checkpoint(tmp_path / "middle.ckpt")
    went_on, run = fit("dstrat" if first == "lightning" else "lightning", 4, tmp_path / "middle.ckpt")
    assert (run.global_step, run.current_epoch) == (32, 4)
    assert all(torch.equal(a, b) for a, b in zip(went_on.parameters(), expected.parameters(), strict=True))


def test_a_folder_becomes_a_file_that_lightning_loads(library, make, tmp_path):
    net, data, trainer = make
    module = net(lr=0.01)
    made = trainer(plugins="portable")
    made.fit(module, datamodule=data())
    made.save_checkpoint(tmp_path / "folder")
    dstrat_lightning.convert_to_lightning(tmp_path / "folder", tmp_path / "other.ckpt")
    dstrat_lightning.convert_to_lightning(tmp_path / "other.ckpt", tmp_path / "file.ckpt")
    for loaded in (
        net.load_from_checkpoint(tmp_path / "file.ckpt"),
        dstrat_lightning.load_from_checkpoint(net, tmp_path / "folder"),
    ):
        assert loaded.hparams.lr == 0.01
        assert not isinstance(loaded, dstrat.TrainModule)
        assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))


def test_lightnings_registry_has_the_strategies(library):
    strategies = library.strategies.StrategyRegistry.available_strategies()
    assert {"dstrat_ddp", "dstrat_fsdp", "dstrat_deepspeed_stage_2"} <= set(strategies)


@pytest.mark.parametrize("order", ["{ours}; {theirs}", "{theirs}; {ours}"])
@pytest.mark.parametrize("name", [LIBRARIES[0], pytest.param(LIBRARIES[1], marks=pytest.mark.variant)])
def test_the_order_of_imports_does_not_matter(name, order):
    lines = order.format(ours="import dstrat_lightning", theirs=f"import {name} as pl")
    code = f"{lines}; assert 'dstrat_ddp' in pl.strategies.StrategyRegistry"
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_listing_imports_no_lightning():
    code = (
        "import sys; from dstrat.plugins.catalog import get_catalog; get_catalog(); import dstrat_lightning; "
        "assert not {'torch', 'lightning', 'pytorch_lightning'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_options_of_storage_are_refused_not_ignored(make, tmp_path):
    _, _, trainer = make
    with pytest.raises(MisuseError, match=r"storage_options=\{'key': 1\}.*leave it out"):
        TrainerView(trainer()).save_checkpoint(tmp_path / "file", storage_options={"key": 1})


def test_a_view_is_its_trainer(make):
    _, _, trainer = make
    made = trainer()
    assert TrainerView(made) == TrainerView(made) == made
    assert len({TrainerView(made), TrainerView(made)}) == 1


def test_a_metric_object_is_logged_with_lightnings_default_of_sync_dist(make):
    torchmetrics = pytest.importorskip("torchmetrics")
    net, data, trainer = make

    class Metered(net):
        def __init__(self):
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            self.mean.update(3.0)
            self.log("mean", self.mean, on_step=False, on_epoch=True, sync_dist=False)
            return super().training_step(batch, batch_idx)

    made = trainer()
    made.fit(Metered(), datamodule=data())
    assert made.callback_metrics["mean"] == 3.0


@pytest.mark.parametrize("every", [0, 1])
def test_reloaded_loaders_leave_lightnings_random_numbers(library, make, every):
    net, data, trainer = make

    class Drawing(net):
        def on_train_epoch_end(self):
            self.losses.append(float(torch.rand(())))

    seen = {}
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    for name, new in (("lightning", lambda **o: library.Trainer(accelerator="cpu", **off, **o)), ("dstrat", trainer)):
        library.seed_everything(1, verbose=False)
        module = Drawing(dropout=0.0)
        new(max_epochs=4, reload_dataloaders_every_n_epochs=every).fit(module, datamodule=data())
        seen[name] = module.losses
    assert seen["dstrat"] == pytest.approx(seen["lightning"], abs=1e-6)


def test_a_strategy_is_an_instance_of_lightnings_class_too(library, make):
    from dstrat_ddp import DDPStrategy

    _, _, trainer = make
    view = TrainerView(trainer(strategy=DDPStrategy()))
    assert isinstance(view.strategy, library.strategies.DDPStrategy)
    assert isinstance(view.strategy, DDPStrategy)
    assert not isinstance(view.strategy, library.strategies.FSDPStrategy)
    assert view.strategy.world_size == 1


def test_a_strategy_has_the_module_and_names_dstrat_for_what_it_lacks(library, make):
    net, data, trainer = make

    class Look(library.Callback):
        def on_train_start(self, trainer, pl_module):
            self.has_module = trainer.strategy.lightning_module is pl_module

    look = Look()
    trainer(callbacks=look).fit(net(), datamodule=data())
    assert look.has_module
    with pytest.raises(AttributeError, match=r"the strategy of dstrat's Trainer has no attribute 'zero_stage_3'"):
        _ = TrainerView(trainer()).strategy.zero_stage_3


def test_a_logger_that_a_callback_sets_writes_on_rank_0_only(library, make, tmp_path):
    net, data, _ = make
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}

    class Set(library.Callback):
        def on_train_start(self, trainer, pl_module):
            trainer.logger = logger = CSVLogger(tmp_path / "logs", name="", version=trainer.global_rank)
            (tmp_path / f"{trainer.global_rank} {logger.writes}").touch()

    trainer = dstrat.Trainer(strategy="ddp_fork", accelerator="cpu", devices=2, max_epochs=1, callbacks=Set(), **off)
    trainer.fit(net(), datamodule=data())
    assert (tmp_path / "0 True").exists()
    assert (tmp_path / "1 False").exists()


def test_a_logger_can_be_set_and_loops_say_what_to_do(library, make, tmp_path):
    _, _, trainer = make
    view, logger = TrainerView(trainer()), library.loggers.CSVLogger(tmp_path)
    view.logger = logger
    assert view.logger is logger
    with pytest.raises(AttributeError, match=r"fit_loop.epoch_loop of .* has no attribute 'manual_optimization'"):
        _ = view.fit_loop.epoch_loop.manual_optimization


@pytest.mark.parametrize("validates", [True, False])
def test_optimizers_can_depend_on_whether_the_fit_validates(library, make, validates):
    net, data, trainer = make

    class Asking(net):
        def configure_optimizers(self):
            # Both are asked by libraries that monitor val_loss where it exists, and else the loss.
            has_loader = self.trainer.fit_loop.epoch_loop.val_loop._data_source.is_defined()
            monitor = "val_loss" if self.trainer.enable_validation else "loss"
            seen.append((has_loader, monitor))
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": monitor}}

    seen = []
    data = data()
    data.setup("fit")
    loaders = (data.train_dataloader(), data.val_dataloader() if validates else None)
    trainer().fit(Asking(), *loaders)
    library.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False).fit(Asking(), *loaders)
    assert seen == [(validates, "val_loss" if validates else "loss")] * 2


def test_a_checkpoint_io_of_lightning_has_a_counterpart(library, make):
    from dstrat.errors import RequestError

    class OfALibrary(library.plugins.io.TorchCheckpointIO):
        """Whose class has no counterpart by its own name."""

    _, _, trainer = make
    for io in (library.plugins.io.TorchCheckpointIO(), OfALibrary()):
        with pytest.raises(RequestError, match=r"pass the one of dstrat: from dstrat.plugins import TorchCheckpointIO"):
            trainer(plugins=[io])


def test_other_components_of_lightning_have_counterparts_too(library):
    from dstrat.errors import RequestError

    components = {
        "strategy": library.strategies.DDPStrategy(),
        "accelerator": library.accelerators.CPUAccelerator(),
        "profiler": library.profilers.SimpleProfiler(),
    }
    modules = {"strategy": "strategies", "accelerator": "accelerators", "profiler": "profilers"}
    for argument, value in components.items():
        counterpart = f"from dstrat.{modules[argument]} import {type(value).__name__}"
        with pytest.raises(RequestError, match=f"pass the one of dstrat: {counterpart}"):
            dstrat.Trainer(**{argument: value})


def test_a_summary_is_allowed_beside_a_switched_off_default(library, make):
    net, data, trainer = make
    trainer(callbacks=library.callbacks.ModelSummary()).fit(net(), datamodule=data())


def test_an_own_loop_logs_to_a_logger_of_lightning_or_fabric(library, tmp_path):
    fabric = importlib.import_module("lightning.fabric.loggers")
    for logger in (library.loggers.CSVLogger(tmp_path / "theirs"), fabric.CSVLogger(tmp_path / "fabric")):
        loop = dstrat.OwnLoop(dstrat.build(accelerator="cpu", devices=1), loggers=logger)
        loop.launch(lambda loop: loop.log("x", 1.0))
        logger.save()
        assert (Path(logger.log_dir) / "metrics.csv").exists()


@pytest.mark.parametrize(
    ("alias", "method"), [("ddp_fork", "fork"), ("ddp_notebook", "fork"), ("ddp_spawn", "spawn"), ("ddp", "popen")]
)
def test_an_alias_keeps_its_start_method(library, alias, method):
    from dstrat_lightning.strategy import strategy_class

    assert strategy_class(library.__name__)(alias)._start_method == method


def test_a_strategy_in_place_of_an_alias_is_an_error(library):
    from dstrat_lightning.strategy import strategy_class

    with pytest.raises(MisuseError, match=r"SingleDeviceStrategy object at .*: pass an alias, whose options follow it"):
        strategy_class(library.__name__)(dstrat.SingleDeviceStrategy())


@pytest.mark.parametrize("which", ["ddp_fork", "dstrat_ddp_fork"])
def test_lightnings_trainer_validates_batch_norm_with_the_statistics_that_are_kept(library, which):
    class Normed(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 1))

        def training_step(self, batch, batch_idx):
            return (self.layers(batch[0]) - batch[1]).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("val", self.training_step(batch, batch_idx), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.01)

    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(64, 4, generator=numbers) * torch.arange(1, 65)[:, None]  # batches differ, and so do statistics
    y = torch.randn(64, 1, generator=numbers)
    loaders = [torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), 4, shuffle=s) for s in (True, False)]
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    library.seed_everything(1, verbose=False)
    net = Normed()
    made = library.Trainer(accelerator="cpu", devices=2, strategy=which, max_epochs=1, num_sanity_val_steps=0, **off)
    made.fit(net, *loaders)
    with torch.no_grad():
        kept = net.eval().training_step((x, y), 0)
    assert float(made.callback_metrics["val"]) == pytest.approx(float(kept), rel=1e-4)
    assert float(kept) == pytest.approx(0.995, abs=5e-4)


def test_lightnings_trainer_averages_gradients_of_manual_optimization():
    library = importlib.import_module("lightning.pytorch")

    class Two(library.LightningModule):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)

        def training_step(self, batch, batch_idx):
            for optimizer, layer in zip(self.optimizers(), (self.first, self.second), strict=True):
                self.toggle_optimizer(optimizer)
                loss = (self.second(self.first(batch[0])) - batch[1]).square().mean()
                optimizer.zero_grad()
                self.manual_backward(loss)
                assert all(parameter.grad is not None for parameter in layer.parameters())
                optimizer.step()
                self.untoggle_optimizer(optimizer)

        def configure_optimizers(self):
            return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in (self.first, self.second)]

    numbers = torch.Generator().manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(32, 4, generator=numbers), torch.randn(32, 1, generator=numbers))
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    states = []
    for strategy in ("ddp_fork_find_unused_parameters_true", "dstrat_ddp_fork_find_unused_parameters_true"):
        library.seed_everything(3, verbose=False)
        module = Two()
        loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)
        made = library.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **off)
        made.fit(module, loader)
        states.append(module.state_dict())
    torch.testing.assert_close(*states, rtol=1e-6, atol=0)


def test_lightnings_trainer_pickles_a_strategy_for_spawn(library):
    from dstrat_lightning.strategy import strategy_class

    copy = pickle.loads(pickle.dumps(strategy_class(library.__name__)("ddp_spawn")))
    assert (copy.alias, copy._start_method) == ("ddp_spawn", "spawn")
    assert isinstance(copy, library.strategies.DDPStrategy)


def test_lightnings_trainer_gives_ranks_that_share_a_batch_the_same_samples():
    from dstrat_lightning.strategy import strategy_class

    library = importlib.import_module("lightning.pytorch")
    values = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))

    class Attends(library.LightningModule):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layer = torch.nn.Linear(1, 4)

        def training_step(self, batch, batch_idx):
            heads = self.layer(batch.unsqueeze(-1)).unflatten(2, (2, 2)).transpose(1, 2)
            attended = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
            return (attended.sum((1, 3)) - batch).square().mean()

        def validation_step(self, batch, batch_idx):
            self.log("val_loss", self.training_step(batch, batch_idx), sync_dist=True)

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.05)

    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    states = []
    for devices, strategy in ((1, "auto"), (2, strategy_class(library.__name__)("mesh(cp=2)", start_method="fork"))):
        module = Attends()
        made = library.Trainer(accelerator="cpu", devices=devices, strategy=strategy, max_epochs=3, **off)
        made.fit(module, DataLoader(values, batch_size=16), DataLoader(values, batch_size=4))
        states.append({**module.state_dict(), "val_loss": made.callback_metrics["val_loss"]})
    torch.testing.assert_close(*states)


def test_lightnings_trainer_gets_whole_weights_from_forked_ranks_with_shards():
    from dstrat_lightning.strategy import strategy_class

    library = importlib.import_module("lightning.pytorch")
    net, data, _ = nets.classes(library)
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    states = []
    for strategy in ("ddp_fork", strategy_class(library.__name__)("fsdp", start_method="fork")):
        library.seed_everything(3, verbose=False)
        module = net(dropout=0.0)
        before = module.layers[0].weight.clone()
        made = library.Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, **off)
        made.fit(module, datamodule=data())
        assert not torch.equal(before, module.layers[0].weight)
        states.append(module.state_dict())
    torch.testing.assert_close(*states)


def test_in_lightnings_trainer_ddp_alone_is_its_ddp(library):
    from dstrat_lightning.strategy import strategy_class

    theirs, ours = library.strategies, strategy_class(library.__name__)
    assert isinstance(ours("ddp"), theirs.DDPStrategy)
    assert not isinstance(ours("fsdp"), theirs.DDPStrategy | theirs.FSDPStrategy)


class Metric:
    """An object that a file of torch has as a pickle."""


def test_lightnings_trainer_with_ddp_loads_trusted_pickles(library, tmp_path):
    net, data, _ = nets.classes(library)
    off = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    best = library.callbacks.ModelCheckpoint(tmp_path, filename="best", monitor="val_loss")
    made = library.Trainer(accelerator="cpu", devices=1, strategy="dstrat_ddp", max_epochs=1, callbacks=[best], **off)
    module = net(dropout=0.0)
    module.hparams["metric"] = Metric()
    made.fit(module, datamodule=data())
    trained = [p.detach().clone() for p in module.parameters()]
    with torch.no_grad():
        module.layers[0].weight.zero_()
    made.validate(datamodule=data(), ckpt_path="best", weights_only=False, verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), trained, strict=True))


def test_the_best_checkpoint_is_a_file_of_torch(library, make, tmp_path):
    net, data, trainer = make
    for name, plugins, is_file in (("default", None, True), ("chosen", "portable", False)):
        best = library.callbacks.ModelCheckpoint(tmp_path / name, monitor="val_loss")
        made = trainer(callbacks=[best], enable_checkpointing=True, plugins=plugins)
        made.fit(net(), datamodule=data())
        assert Path(best.best_model_path).is_file() == is_file
        assert made.plan.checkpoint_io == ("lightning" if is_file else "portable")
        if is_file:
            weights = torch.load(best.best_model_path, weights_only=True)["state_dict"]
            assert weights.keys() == net().state_dict().keys()
            trainer().fit(net(), datamodule=data(), ckpt_path=best.best_model_path)


def test_lightnings_own_method_and_trainer_load_the_best_checkpoint(library, make, tmp_path):
    net, data, trainer = make
    best = library.callbacks.ModelCheckpoint(tmp_path, monitor="val_loss", save_last=True)
    module = net(lr=0.01)
    trainer(callbacks=[best], enable_checkpointing=True, max_epochs=1).fit(module, datamodule=data())
    loaded = net.load_from_checkpoint(best.best_model_path)
    assert loaded.hparams.lr == 0.01
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), module.parameters(), strict=True))
    off = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False, "logger": False}
    theirs = library.Trainer(accelerator="cpu", devices=1, max_epochs=2, **off)
    theirs.fit(net(), datamodule=data(), ckpt_path=best.last_model_path)
    assert theirs.current_epoch == 2
    ours = dstrat_lightning.load_from_checkpoint(net, best.best_model_path)
    assert all(torch.equal(a, b) for a, b in zip(ours.parameters(), module.parameters(), strict=True))


@pytest.mark.parametrize("saved_by", ["portable", "torch", "lightning"])
def test_a_run_with_the_default_resumes_from_each_format(library, make, tmp_path, saved_by):
    net, data, trainer = make
    path = tmp_path / "saved.ckpt"
    library.seed_everything(1, verbose=False)
    first = trainer(max_epochs=1, plugins=saved_by)
    first.fit(net(dropout=0.0), nets.unshuffled(data()))
    first.save_checkpoint(path)
    library.seed_everything(1, verbose=False)
    whole = net(dropout=0.0)
    trainer(max_epochs=2).fit(whole, nets.unshuffled(data()))
    resumed = net(dropout=0.0)
    made = trainer(max_epochs=2)
    made.fit(resumed, nets.unshuffled(data()), ckpt_path=path)
    assert made.global_step == 16
    assert all(torch.equal(a, b) for a, b in zip(resumed.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("request_", [{"ckpt_path": "last"}, {"resume": "auto"}])
def test_the_newest_of_lightnings_files_is_found_by_its_steps(library, make, tmp_path, request_):
    net, data, trainer = make
    saving = library.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)
    trainer(callbacks=[saving], enable_checkpointing=True, max_epochs=2).fit(net(), datamodule=data())
    first = min(tmp_path.glob("*.ckpt"))
    os.utime(first)  # the older one by its steps is now the newer file
    again = library.callbacks.ModelCheckpoint(tmp_path, save_top_k=-1)
    made = trainer(callbacks=[again], enable_checkpointing=True, max_epochs=3)
    made.fit(net(), datamodule=data(), **request_)
    assert Path(made.ckpt_path).name == "epoch=1-step=16.ckpt"


def test_where_shards_are_saved_a_line_says_how_to_get_a_file(library, make, caplog):
    from dstrat_fsdp import FSDPStrategy

    net, data, trainer = make
    with caplog.at_level("INFO"):
        trainer(strategy=FSDPStrategy()).fit(net(), datamodule=data())
    assert (
        "a folder of shards, which torch.load and Lightning's load_from_checkpoint cannot read: for single"
        in caplog.text
    )
    assert [record.levelname for record in caplog.records if "a folder of shards" in record.message] == ["WARNING"]


def test_full_tensors_of_shards_are_saved_in_a_file(make):
    from dstrat_fsdp import FSDPStrategy

    class Full(FSDPStrategy):
        saves_full_state = True

    net, data, trainer = make
    made = trainer(strategy=Full())
    made.fit(net(), datamodule=data())
    assert made.plan.checkpoint_io == "lightning"


def test_private_names_are_refused_by_an_error_that_names_dstrat(make):
    _, _, trainer = make
    with pytest.raises(AttributeError, match=r"dstrat's Trainer has no attribute '_accelerator_connector'"):
        _ = TrainerView(trainer())._accelerator_connector


class EstimatedNet(lightning.pytorch.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def configure_model(self):
        assert self.trainer is not None

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        steps = self.trainer.estimated_stepping_batches
        return [optimizer], [torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=steps)]


def estimated():
    return EstimatedNet(), torch.zeros(4, 8)


def test_memory_of_a_module_is_estimated_before_a_run():
    shown = CliRunner().invoke(
        commands, ["estimate", "--model", f"{__name__}:estimated", "--strategy", "ddp", "--json"]
    )
    assert shown.exit_code == 0, shown.output
    (one,) = json.loads(shown.stdout)["estimates"]
    assert (one["parameters"], one["problem"]) == (4 * (8 * 8 + 8), "")
