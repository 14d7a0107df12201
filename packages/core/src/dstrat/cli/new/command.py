"""``dstrat new``: write a package with a component of the author's own, whose tests pass at once."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dstrat.cli.catalog import loaded_catalog
from dstrat.cli.new.names import check_free, make_names
from dstrat.cli.new.writing import check_can_write, write_package
from dstrat.plugins.component import KINDS
from dstrat.plugins.known import quoted
from dstrat.plugins.offer import kind_label

if TYPE_CHECKING:
    from dstrat.plugins.component import Kind


@click.command(short_help="Write a package with a strategy of your own.")
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--kind", type=click.Choice(KINDS), default="strategy", show_default=True, help="What it offers.")
@click.option("--alias", help="What users write; by default the name of the folder, without 'dstrat-'.")
def new(path: Path, kind: Kind, alias: str | None) -> None:
    """Write a package to the folder PATH, which is also its name, such as dstrat-ring.

    It has a class that works, the entry point by which dstrat finds it, tests that inherit dstrat's conformance kit, a
    README and a workflow for GitHub.  It needs copier: pip install "dstrat[new]".
    """
    folder = Path(os.path.abspath(path))  # noqa: PTH100 - without following links, which have names of their own
    names = make_names(kind, folder.name, alias)
    check_free(kind, names, loaded_catalog())
    check_can_write(folder)
    write_package(kind, names, folder)
    editable = quoted(f"{path}[dev]")
    click.echo(f"{path} has the {kind_label(kind)} {names.alias!r}, {names.package}.{names.class_name}. To test it:")
    click.echo(f"  pip install -e {editable}")
    click.echo(f"  pytest {quoted(str(path))}")
