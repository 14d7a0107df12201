"""The commands below ``dstrat checkpoint``, each imported when it is used."""

from __future__ import annotations

import importlib

import click

_NAMES = ("consolidate", "convert", "diff", "inspect", "verify")


class _Commands(click.Group):
    """The commands, each in a module of its name."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click passes it
        return list(_NAMES)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - click passes it
        if cmd_name not in _NAMES:
            return None
        module = importlib.import_module(f"dstrat.cli.checkpoint.{cmd_name}")
        command: click.Command = getattr(module, cmd_name)
        return command


@click.command(cls=_Commands)
def checkpoint() -> None:
    """Look at checkpoints, verify, compare and convert them.

    A PATH is the folder of a checkpoint, or the file 'last' beside some; or the URL of such a folder in a store that
    fsspec reaches, as s3://bucket/folder is with s3fs.
    """
