"""Arguments from signatures, configuration files, subcommands and hooks of a training program."""

from __future__ import annotations

import os
import pickle
import re

import pytest
import torch
from packages.core.tests.cli.training import program
from packages.core.tests.cli.training.conftest import QUIET
from packages.core.tests.cli.training.program import Net, Notes, Numbers

from dstrat.callbacks import EarlyStopping, ModelCheckpoint
from dstrat.cli import DstratCLI, SaveConfigCallback
from dstrat.errors import ConflictError, MisuseError, RequestError
from dstrat.loggers import CSVLogger
from dstrat.plugins.options import parse_alias

PROGRAM = program.__name__


def test_arguments_reach_trainer_module_and_data(cli):
    made = cli("--trainer.max_epochs=3", "--trainer.limit_train_batches=2", "--model.lr=0.5", "--data.batch_size=2")
    assert (made.trainer.max_epochs, made.trainer.limit_train_batches) == (3, 2)
    assert isinstance(made.trainer.limit_train_batches, int)
    assert (made.model.lr, made.datamodule.batch_size) == (0.5, 2)
    made.trainer.fit(made.model, made.datamodule)
    assert made.trainer.global_step == 6


def test_later_files_and_options_replace_earlier_ones(cli, folder):
    (folder / "base.yaml").write_text("trainer: {max_epochs: 5, devices: 1}\nmodel: {lr: 0.3}\n")
    (folder / "more.json").write_text('{"model": {"lr": 0.2}}')
    made = cli("-c", "base.yaml", "--config=more.json", "--trainer.max_epochs=4")
    assert (made.trainer.max_epochs, made.model.lr) == (4, 0.2)


def test_a_file_that_has_changed_since_an_earlier_command_line_is_read_again(cli, folder):
    for rate in (0.3, 0.2):
        (folder / "base.yaml").write_text(f"model: {{lr: {rate}}}\n")
        assert cli("-c", "base.yaml").model.lr == rate


@pytest.mark.parametrize(
    ("strategy", "options", "mesh"),
    [
        ("ddp(gradient_as_bucket_view=True)", {"gradient_as_bucket_view": True}, None),
        ("fsdp(cpu_offload=True, state_dict_type='full')", {"cpu_offload": True, "state_dict_type": "full"}, None),
        ("mesh(pp=2)", {"pp": 2}, "pp 2"),
        ("mesh(dp_replicate=1, tp=2)", {"dp_replicate": 1, "tp": 2}, "tp 2"),
    ],
)
@pytest.mark.parametrize("quote", ["", '"'])
def test_options_follow_an_alias_in_a_file(cli, folder, strategy, options, mesh, quote):
    alias, _, _ = strategy.partition("(")
    pytest.importorskip(f"dstrat_{alias}")
    (folder / "run.yaml").write_text(f"trainer:\n  strategy: {quote}{strategy}{quote}\n  devices: 2\n")
    trainer = cli("--config=run.yaml").trainer
    assert trainer.plan.strategy_alias == alias
    rows = {row.subject: row.value for row in trainer.plan.choices}
    assert parse_alias(rows["strategy"]).options == options
    assert rows.get("mesh") == mesh


def test_a_misspelled_option_of_an_alias_in_a_file_is_answered_with_the_nearest(cli, folder):
    pytest.importorskip("dstrat_fsdp")
    (folder / "run.yaml").write_text("trainer:\n  strategy: fsdp(cpu_ofload=True)\n  devices: 2\n")
    with pytest.raises(RequestError, match=r"no option 'cpu_ofload': did you mean 'cpu_offload'\?"):
        cli("--config=run.yaml")


def test_classes_and_nested_objects_are_named(cli):
    model = f"--model={PROGRAM}.Net"
    made = cli(
        model,
        "--model.backbone=Backbone",
        "--model.backbone.width=6",
        f"--data={PROGRAM}.Numbers",
        model=None,
        data=None,
    )
    assert made.model.backbone.width == 6
    made = cli("--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=loss", "--trainer.logger=CSVLogger")
    assert made.trainer.early_stopping_callback.monitor == "loss"
    assert isinstance(made.trainer.logger, CSVLogger)


def test_the_printed_configuration_gives_the_same_again(cli, folder, capsys):
    options = [
        "--trainer.max_time=00:01:00",
        "--trainer.callbacks=ModelCheckpoint",
        "--trainer.callbacks.save_last=link",
    ]
    options += ["--trainer.enable_checkpointing=true", "--model.backbone.width=3"]
    with pytest.raises(SystemExit) as ended:
        cli(*options, "--print_config")
    assert ended.value.code == 0
    text = capsys.readouterr().out
    (folder / "printed.yaml").write_text(text)
    made = cli("--config=printed.yaml")
    assert made.trainer.max_time == "00:01:00"
    assert made.model.backbone.width == 3
    assert next(c for c in made.trainer.callbacks if isinstance(c, ModelCheckpoint)).save_last == "link"
    assert "environ" not in text


def test_help_has_docstrings_types_and_the_aliases_of_installed_packages(cli, capsys):
    with pytest.raises(SystemExit):
        cli("fit", "--help", model=Net)
    text = " ".join(capsys.readouterr().out.split())
    assert "--model.lr LR The step size of plain gradient descent. (type: float, default: 0.1)" in text
    assert re.search(r"Installed: [^;]*\bddp, ddp2, [^;]*; dstrat strategies --all lists variants", text)
    assert re.search(r"Installed: cpu, [^;]*; dstrat accelerators lists", text)
    assert "Learning-rate schedulers of the optimizer:" in text
    assert "<class" not in text
    assert "--resume" in text
    assert "``" not in text


def test_help_begins_with_the_ten_most_used_arguments(cli, capsys):
    with pytest.raises(SystemExit):
        cli("fit", "--help", model=Net)
    usage, description, first, others = capsys.readouterr().out.split("\n\n", 3)
    assert usage.endswith(" fit [options]")
    assert description == "Train a module."
    title, *rows = first.split("\n")
    assert (title, len(rows)) == ("most used:", 10)
    assert max(map(len, rows)) <= 80
    assert all(f"\n  {row.split()[0]} " in others or f", {row.split()[0]} " in others for row in rows)
    with pytest.raises(SystemExit):
        cli("test", "--help", model=Net)
    shown = capsys.readouterr().out
    assert "--resume" not in shown
    assert "\n  --ckpt_path PATH " in shown


def test_linked_arguments_follow(cli):
    class Linked(DstratCLI):
        def add_arguments_to_parser(self, parser):
            parser.link_arguments("data.batch_size", "model.batch_size")
            parser.link_arguments("data.num_features", "model.backbone.init_args.width", apply_on="instantiate")

    made = cli(f"--model.backbone={PROGRAM}.Backbone", "--data.batch_size=3", kind=Linked)
    assert (made.model.batch_size, made.model.backbone.width) == (3, 2)


def test_subcommands_run_with_hooks_before_and_after(cli):
    class Hooked(DstratCLI):
        def before_fit(self):
            self.seen = [self.trainer.global_step]

        def after_fit(self):
            self.seen.append(self.trainer.global_step)

    assert cli("fit", "--data.size=8", kind=Hooked).seen == [0, 2]
    for subcommand in ("validate", "test", "predict"):
        made = cli(subcommand, "--trainer.logger=false")
        assert made.subcommand == subcommand == made.trainer.state.fn.value


def test_a_checkpoint_is_passed_to_the_subcommand(cli, folder):
    cli("fit", "--trainer.enable_checkpointing=true", "--trainer.default_root_dir=first", "--model.lr=0.01")
    (path,) = (folder / "first").rglob("epoch*")
    done = cli("test", f"--ckpt_path={path}", "--trainer.logger=false")
    assert done.trainer.ckpt_path == str(path)
    resumed = cli("fit", f"--ckpt_path={path}", "--trainer.max_epochs=2", "--trainer.default_root_dir=second")
    assert resumed.trainer.global_step == 8


def test_defaults_and_callbacks_of_the_program(cli):
    class WithStopping(DstratCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_lightning_class_args(EarlyStopping, "stopping")
            parser.set_defaults({"stopping.monitor": "loss", "stopping.patience": 5})

    made = cli("--stopping.patience=7", kind=WithStopping, trainer_defaults={**QUIET, "callbacks": Notes("always")})
    stopping = made.trainer.early_stopping_callback
    assert (stopping.monitor, stopping.patience) == ("loss", 7)
    assert [callback.text for callback in made.trainer.callbacks if isinstance(callback, Notes)] == ["always"]


def test_functions_in_place_of_classes(cli):
    assert cli("--model.width=5", model=program.make_net).model.backbone.width == 5


def test_a_configuration_as_a_dictionary():
    made = DstratCLI(Net, Numbers, run=False, args={"trainer": QUIET, "model": {"lr": 0.25}})
    assert (made.trainer.max_epochs, made.model.lr) == (1, 0.25)


def test_environment_variables_are_read_where_the_program_wants_it(cli, monkeypatch):
    monkeypatch.setenv("DSTRAT_MODEL__LR", "0.125")
    assert cli(parser_kwargs={"default_env": True}).model.lr == 0.125
    assert cli().model.lr == 0.1


def test_omegaconf_interpolates(cli, folder):
    (folder / "c.yaml").write_text("model: {lr: 0.5, batch_size: '${data.batch_size}'}\ndata: {batch_size: 2}\n")
    assert cli("--config=c.yaml", parser_kwargs={"parser_mode": "omegaconf"}).model.batch_size == 2


def test_the_seed_is_set_before_objects_are_made(cli):
    first, second, other = (cli(f"--seed_everything={seed}").model.first_random for seed in (3, 3, 4))
    assert first == second != other
    assert cli().config.seed_everything == 0
    assert cli("--seed_everything=false").model.first_random != cli("--seed_everything=false").model.first_random


# Optimizers


def test_an_optimizer_and_a_scheduler_from_options_train(cli, caplog):
    caplog.set_level("INFO")
    options = ["--optimizer=torch.optim.Adam", "--optimizer.lr=0.02", "--lr_scheduler=ReduceLROnPlateau"]
    made = cli("fit", *options, "--lr_scheduler.monitor=val_loss", "--lr_scheduler.factor=0.5")
    (optimizer,) = made.trainer.optimizers
    assert (type(optimizer), optimizer.defaults["lr"]) == (torch.optim.Adam, 0.02)
    (scheduler,) = made.trainer.lr_scheduler_configs
    assert (scheduler.monitor, scheduler.scheduler.factor) == ("val_loss", 0.5)
    assert "--optimizer replaces configure_optimizers of Net" in caplog.text
    pickle.dumps(made.model)  # as a start of processes with spawn needs


def test_optimizers_of_one_class_and_a_hook_for_both(cli):
    class OneClass(DstratCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args(torch.optim.SGD)
            parser.add_lr_scheduler_args(torch.optim.lr_scheduler.ExponentialLR)
            parser.set_defaults({"lr_scheduler.gamma": 0.5, "optimizer.lr": 0.25})

        @staticmethod
        def configure_optimizers(module, optimizer, lr_scheduler=None):
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": lr_scheduler, "interval": "step"}}

    made = cli("fit", "--optimizer.momentum=0.5", kind=OneClass)
    assert made.trainer.optimizers[0].defaults["momentum"] == 0.5
    assert made.trainer.optimizers[0].param_groups[0]["lr"] == 0.25 * 0.5**4


def test_optimizers_that_the_module_gets(cli):
    options = [
        "--model.optimizer=Adam",
        "--model.optimizer.lr=0.5",
        "--model.scheduler=StepLR",
        "--model.scheduler.step_size=1",
    ]
    made = cli("fit", *options, model=program.WithOptimizers)
    assert made.trainer.optimizers[0].defaults["lr"] == 0.5
    assert made.trainer.lr_scheduler_configs[0].scheduler.step_size == 1


def test_linked_optimizers_reach_the_module_as_class_and_arguments(cli):
    class Linking(DstratCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args(torch.optim.SGD, nested_key="mine", link_to="model.optimizer")
            parser.set_defaults({"mine.lr": 0.5})

    made = cli("fit", "--mine.momentum=0.25", kind=Linking, model=program.WithLinkedOptimizer)
    assert made.trainer.optimizers[0].defaults["momentum"] == 0.25


def test_a_scheduler_alone_and_two_optimizers_are_errors(cli):
    with pytest.raises(MisuseError, match="--lr_scheduler needs an --optimizer"):
        cli("--lr_scheduler=StepLR", "--lr_scheduler.step_size=1")

    class Two(DstratCLI):
        def add_arguments_to_parser(self, parser):
            parser.add_optimizer_args(nested_key="first")
            parser.add_optimizer_args(nested_key="second")

    with pytest.raises(MisuseError, match="first, second would all be used"):
        cli("--first=SGD", "--second=SGD", kind=Two)


# The saved configuration


def test_the_configuration_is_saved_with_the_logs_and_gives_the_same_run(cli, folder):
    first = cli("fit", "--model.lr=0.3", "--seed_everything=5")
    saved = folder / "dstrat_logs" / "version_0" / "config.yaml"
    assert saved.read_text().startswith("# dstrat==")
    again = cli("fit", f"--config={saved}")
    assert again.model.lr == 0.3
    assert again.trainer.callback_metrics["loss"] == first.trainer.callback_metrics["loss"]
    assert (folder / "dstrat_logs" / "version_1" / "config.yaml").read_text() == saved.read_text()
    cli("fit", "--trainer.fast_dev_run=true")
    assert len(list(folder.rglob("config.yaml"))) == 2


def test_a_saved_configuration_is_not_overwritten(cli, folder):
    at = ["--trainer.logger=false", "--trainer.default_root_dir=here"]
    cli("fit", *at)
    cli("fit", *at)  # the same
    text = (folder / "here" / "config.yaml").read_text()
    with pytest.raises(
        ConflictError, match=r"here/config.yaml has the configuration of another run.*save_config_kwargs"
    ):
        cli("fit", *at, "--model.lr=0.2")
    assert (folder / "here" / "config.yaml").read_text() == text
    cli("fit", *at, "--model.lr=0.2", save_config_kwargs={"overwrite": True})
    assert "lr: 0.2" in (folder / "here" / "config.yaml").read_text()
    cli("fit", *at, "--model.lr=0.4", save_config_callback=None)


def test_a_program_saves_its_configuration_elsewhere_too(cli, folder):
    class Elsewhere(SaveConfigCallback):
        def save_config(self, trainer, module, stage):
            (folder / f"{stage}.yaml").write_text(self.text)

    cli("fit", save_config_callback=Elsewhere, save_config_kwargs={"save_to_log_dir": False})
    assert "max_epochs: 1" in (folder / "fit.yaml").read_text()
    assert not list(folder.rglob("config.yaml"))


def test_the_environment_is_not_in_a_saved_configuration(cli, folder, monkeypatch):
    monkeypatch.setenv("MY_SECRET", "never to be written")
    cli("fit", '--trainer.plugins=[{"class_path": "dstrat.plugins.environments.LocalEnvironment"}]')
    (saved,) = folder.rglob("config.yaml")
    assert "LocalEnvironment" in saved.read_text()
    assert os.environ["MY_SECRET"] not in saved.read_text()
