"""The entry point of the command line."""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

import click
from typing_extensions import override

from dstrat.errors import DstratError
from dstrat.plugins.settings import nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

_HOMES = {
    "accelerators": "dstrat.cli.components",
    "checkpoint": "dstrat.cli.checkpoint.group",
    "choose": "dstrat.cli.choose.command",
    "doctor": "dstrat.cli.doctor",
    "estimate": "dstrat.cli.estimate.command",
    "explain": "dstrat.cli.explain.command",
    "fit": "dstrat.cli.training.commands",
    "measure": "dstrat.cli.measure.command",
    "new": "dstrat.cli.new.command",
    "plugins": "dstrat.cli.components",
    "plot": "dstrat.cli.runs.plot",
    "predict": "dstrat.cli.training.commands",
    "report": "dstrat.cli.runs.report",
    "runs": "dstrat.cli.runs.command",
    "show": "dstrat.cli.components",
    "strategies": "dstrat.cli.components",
    "submit": "dstrat.cli.submit",
    "test": "dstrat.cli.test",
    "validate": "dstrat.cli.training.commands",
    "verify": "dstrat.cli.verify.command",
}

_OPTIONS_OF_TEST = ("--help", "--json", "--kind", "--tier", "-h")


class LazyGroup(click.Group):
    """A group of commands, each imported when it is used, so that listing strategies does not import torch.

    Args:
        homes: Modules by the names of commands, which the commands have in them too.
        **options: Arguments of ``click.Group``.
    """

    def __init__(self, *, homes: Mapping[str, str], **options: Any) -> None:
        super().__init__(**options)
        self._homes = homes

    @override
    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted(self._homes)

    @override
    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._homes:
            return None
        command: click.Command = getattr(importlib.import_module(self._homes[cmd_name]), cmd_name)
        return command

    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in self._homes and not name.startswith("-"):
            near = nearest(name, self._homes)
            meant = f"did you mean {' or '.join(map(repr, near))}?" if near else f"choose from {', '.join(self._homes)}"
            ctx.fail(f"there is no command {name!r}: {meant}")
        return super().resolve_command(ctx, args)


class _Commands(LazyGroup):
    @override
    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        # Both have this name: the kit takes an alias, and the subcommand of a program only options.
        options = [argument.partition("=")[0] for argument in args[1:] if argument.startswith("-")]
        if args[0] == "test" and not set(options) <= set(_OPTIONS_OF_TEST):
            from dstrat.cli.training.commands import test_module

            return "test", test_module, args[1:]
        return super().resolve_command(ctx, args)


@click.command(cls=_Commands, homes=_HOMES, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="dstrat", message="%(package)s %(version)s")
def commands() -> None:
    """Distributed-training strategies for PyTorch: what there is, what would run, and whether it would work.

    Exit codes: 0 all is well, 1 a problem was found, 2 the command cannot be carried out as given.
    """


def main() -> None:
    """Run the command that the arguments name, and exit."""
    try:
        commands(prog_name="dstrat")  # not __main__.py, with python -m
    except DstratError as error:  # about the request: one line, without a traceback
        click.echo(f"dstrat: {error}", err=True)
        sys.exit(2)
