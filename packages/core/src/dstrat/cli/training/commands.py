"""``dstrat fit``, ``validate``, ``predict``, and ``test`` of a module that the options name."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import click

from dstrat.errors import DstratError, MissingRequirementError
from dstrat.plugins.known import pip_command

_TAKES_ALL = {"ignore_unknown_options": True, "help_option_names": []}  # jsonargparse has its own --help


@click.command(context_settings=_TAKES_ALL, short_help="Train a module from a configuration.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def fit(arguments: tuple[str, ...]) -> None:
    """Train: ``dstrat fit --config run.yaml``."""
    run_trainer("fit", arguments)


@click.command(context_settings=_TAKES_ALL, short_help="Validate a module from a configuration.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def validate(arguments: tuple[str, ...]) -> None:
    """Validate: ``dstrat validate --config run.yaml --ckpt_path PATH``."""
    run_trainer("validate", arguments)


@click.command(context_settings=_TAKES_ALL, short_help="Predict with a module from a configuration.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def predict(arguments: tuple[str, ...]) -> None:
    """Predict: ``dstrat predict --config run.yaml --ckpt_path PATH``."""
    run_trainer("predict", arguments)


@click.command(context_settings=_TAKES_ALL)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def test_module(arguments: tuple[str, ...]) -> None:
    """Test a module, where ``dstrat test`` without such options tests a strategy."""
    run_trainer("test", arguments)


def run_trainer(subcommand: str, arguments: tuple[str, ...]) -> None:
    """Run a subcommand of :class:`DstratCLI` whose module and data are named by the arguments.

    Raises:
        MissingRequirementError: jsonargparse is not installed.
    """
    if importlib.util.find_spec("jsonargparse") is None:
        raise MissingRequirementError(
            f"dstrat {subcommand} needs jsonargparse, which is not installed: {pip_command('dstrat[cli]')}"
        )
    sys.path.insert(0, str(Path.cwd()))  # as python -m does: the user's modules are in the working directory
    from dstrat.cli.training.dstrat_cli import DstratCLI

    class Program(DstratCLI):
        def _run_subcommand(self, subcommand: str) -> None:
            try:
                super()._run_subcommand(subcommand)
            except DstratError:  # main() would print one line; an error of the run needs its traceback
                sys.excepthook(*sys.exc_info())
                sys.exit(1)

    try:
        Program(args=[subcommand, *arguments])
    except KeyboardInterrupt:  # click would print "Aborted!" and exit with 1
        sys.exit(130)
