"""Programs that read arguments in this process, in a folder of their own."""

from __future__ import annotations

import pytest
from packages.core.tests.cli.training.program import Net, Numbers

from dstrat.cli import DstratCLI

QUIET = {
    "accelerator": "cpu",
    "max_epochs": 1,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
    "num_sanity_val_steps": 0,
}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """The working directory, which the tests write to."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["train.py"])
    return tmp_path


@pytest.fixture
def cli():
    """Make a command line that only makes the objects, unless the first argument is a subcommand."""

    def make(*arguments, model=Net, data=Numbers, kind=DstratCLI, **options):
        runs = bool(arguments) and arguments[0] in kind.subcommands()
        options = {"run": runs, "trainer_defaults": QUIET, **options}
        return kind(model, data, args=list(arguments), **options)

    return make


@pytest.fixture
def refused(cli, capsys):
    """Return what a command line with an error in it prints, and check that it ends with 2."""

    def read(*arguments, **options):
        with pytest.raises(SystemExit) as ended:
            cli(*arguments, **options)
        assert ended.value.code == 2
        return capsys.readouterr().err.strip()

    return read
