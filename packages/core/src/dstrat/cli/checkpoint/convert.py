"""``dstrat checkpoint convert``: a checkpoint of another program as one of ours."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from dstrat.cli.checkpoint.place import PLACE
from dstrat.cli.output import json_option, print_json

if TYPE_CHECKING:
    from dstrat.builtin.checkpoint.place import Place


@click.command()
@click.argument("path", type=PLACE)
@click.argument("output", type=PLACE)
@json_option
def convert(path: Place, output: Place, as_json: bool) -> None:
    """Convert a .ckpt file of PyTorch Lightning, or what an installed plugin can read.

    Weights, the states of optimizers by the names of their parameters, schedulers, counters and hyperparameters are
    taken over.  Files are read without running code from them: hyperparameters of other classes than Python's own are
    left out.
    """
    from rich.console import Console

    from dstrat.builtin.checkpoint.foreign import reader_of
    from dstrat.builtin.checkpoint.portable.checkpoint_io import PortableCheckpointIO
    from dstrat.builtin.checkpoint.stand_ins import StandInCheckpointIO
    from dstrat.cli.catalog import loaded_catalog
    from dstrat.cli.checkpoint.conversion import as_conversion
    from dstrat.cli.checkpoint.lightning import converted

    with Console(stderr=True).status("reading ..."):  # shown in terminals only
        found = reader_of(str(path), loaded_catalog())
        if found is None:
            conversion = converted(StandInCheckpointIO().load_checkpoint(str(path)), path)
        else:
            conversion = as_conversion(found[1].load_checkpoint(str(path)))
    with Console(stderr=True).status("writing ..."):
        PortableCheckpointIO().save_checkpoint(conversion.checkpoint, str(output))
    if as_json:
        print_json({"output": str(output), "taken": conversion.taken, "left_out": conversion.left_out})
        return
    click.echo(f"{output}: {', '.join(conversion.taken)}")
    for reason in conversion.left_out:
        click.echo(f"left out: {reason}")
