"""What a wrong command line or configuration file is answered with, in one line."""

from __future__ import annotations

import pytest
from packages.core.tests.cli.training import program

from dstrat.errors import MisuseError, RequestError

PROGRAM = program.__name__
NET = f"{PROGRAM}.Net"


EPOCHS = "there is no option --trainer.max_epoch: did you mean --trainer.max_epochs or --trainer.min_epochs?"
NO_MODULE = "--model: there is no module 'nowhere': it is neither installed nor in the folder where the program started"
CALLBACKS = "--trainer.callbacks"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("--trainer.max_epoch=3", EPOCHS),
        ("--modl.lr=3", "there is no option --modl.lr: did you mean --model.lr?"),
        ("extra", "'extra' is not understood: write options as --name=value"),
        ("--trainer.max_epochs=few", "--trainer.max_epochs: few is not int or null"),
        ("--trainer.sync_batchnorm=maybe", "--trainer.sync_batchnorm: maybe is not bool"),
        (
            "--trainer.gradient_clip_algorithm=x",
            "--trainer.gradient_clip_algorithm: x is not one of 'norm', 'value' or null",
        ),
        ("--model.lr=fast", "--model.lr: fast is not float"),
        (
            "--model.backbone=Bakbone",
            "--model.backbone: no class has the name 'Bakbone': write its path, as package.module.Class",
        ),
        (
            f"{CALLBACKS}=ModelCheckpont",
            f"{CALLBACKS}: no class has the name 'ModelCheckpont': did you mean 'ModelCheckpoint'?",
        ),
        (f"{CALLBACKS}=EarlyStopping", "dstrat.EarlyStopping needs 'monitor', and got no value"),
        (
            f"{CALLBACKS}=EarlyStopping {CALLBACKS}.monitr=x",
            f"{CALLBACKS}.monitr: dstrat.EarlyStopping has no argument 'monitr': did you mean 'monitor'?",
        ),
        ("--trainer.logger=torch.nn.Linear", "--trainer.logger: torch.nn.Linear is not a Logger"),
    ],
)
def test_a_wrong_option_is_explained_in_one_line(refused, arguments, expected):
    assert refused(*arguments.split()).partition(": ")[2] == expected


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (f"class_path: {PROGRAM}.Nett", f"--model: module {PROGRAM} has no class 'Nett': did you mean 'Net'?"),
        ("class_path: nowhere.Net", NO_MODULE),
        (f"class_path: {NET}, init_args: {{lrr: 1}}", f"--model: {NET} has no argument 'lrr': did you mean 'lr'?"),
        (f"class_path: {NET}, init_args: {{lr: x}}", "--model.lr: x is not float"),
        ("class_path: torch.nn.Linear", "--model: torch.nn.Linear is not a TrainModule"),
    ],
)
def test_a_wrong_configuration_is_explained_in_one_line(refused, folder, model, expected):
    (folder / "c.yaml").write_text(f"model: {{{model}}}\n")
    assert refused("fit", "--config=c.yaml", model=None, data=None).partition(": ")[2] == expected


def test_an_unknown_key_in_a_configuration_has_the_nearest_name(refused, folder):
    (folder / "c.yaml").write_text("trainer: {max_epoch: 3}\n")
    assert refused("fit", "--config=c.yaml").partition(": ")[2] == EPOCHS


def test_a_missing_module_is_asked_for(refused):
    assert "--model must be given: a value, or the path of a class" in refused("fit", model=None, data=None)


def test_files_that_are_missing_or_no_yaml_are_named(refused, folder):
    missing = refused("--config=nowhere.yaml").partition(": ")[2]
    assert missing == f"--config: File does not exist: {str(folder / 'nowhere.yaml')!r}"
    (folder / "c.yaml").write_text("model: [x}\n")
    assert "while parsing a flow sequence" in refused("--config=c.yaml")


def test_an_untyped_argument_without_a_value_is_named(cli):
    with pytest.raises(MisuseError, match="Untyped got no 'width': pass it, and give it a type"):
        cli(model=program.Untyped)
    assert cli("--model.width=5", model=program.Untyped).model.backbone.width == 5


def test_what_a_constructor_raises_comes_out(cli):
    with pytest.raises(RuntimeError, match="3 are too many"):
        cli(f"--model={PROGRAM}.Failing", model=None)
    with pytest.raises(RequestError, match="save_top_k=-5 must be"):
        cli("--trainer.callbacks=ModelCheckpoint", "--trainer.callbacks.save_top_k=-5")
