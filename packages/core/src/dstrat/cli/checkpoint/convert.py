"""``dstrat checkpoint convert``: a checkpoint of another program as a portable one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dstrat.cli.checkpoint.group import CHECKPOINT_PATH
from dstrat.cli.output import json_option, print_json
from dstrat.training.checkpoint.lightning import Conversion, convert_checkpoint

if TYPE_CHECKING:
    from dstrat.checkpoint.paths import CheckpointPath


@click.command(short_help="Convert a checkpoint of another program, such as Lightning.")
@click.argument("path", type=CHECKPOINT_PATH)
@click.argument("output", type=CHECKPOINT_PATH)
@json_option
def convert(path: CheckpointPath, output: CheckpointPath, as_json: bool) -> None:
    """Convert a .ckpt file of PyTorch Lightning, or a checkpoint that an installed plugin can read.

    Weights, the states of optimizers by the names of their parameters, schedulers, counters and hyperparameters are
    converted.  Files are read without running code from them: hyperparameters of other classes than Python's own are
    left out.
    """
    from rich.console import Console

    from dstrat.checkpoint.foreign import reader_of
    from dstrat.checkpoint.portable.checkpoint_io import PortableCheckpointIO
    from dstrat.checkpoint.torch_file import StandInCheckpointIO
    from dstrat.cli.components import loaded_catalog

    with Console(stderr=True).status("reading ..."):  # shown in terminals only
        reader = reader_of(str(path), loaded_catalog())
        if reader is None:
            conversion = convert_checkpoint(StandInCheckpointIO().load_checkpoint(str(path)), path)
        else:
            conversion = as_conversion(reader[1].load_checkpoint(str(path)))
    with Console(stderr=True).status("writing ..."):
        PortableCheckpointIO().save_checkpoint(conversion.checkpoint, str(output))
    if as_json:
        print_json({"output": str(output), "taken": conversion.entries, "left_out": conversion.dropped})
        return
    click.echo(f"{output}: {', '.join(conversion.entries)}")
    for reason in conversion.dropped:
        click.echo(f"left out: {reason}")


def as_conversion(checkpoint: dict[str, Any]) -> Conversion:
    """Return the result of a plugin's checkpoint io, with descriptions of its entries."""
    converted_entries = [
        f"{len(checkpoint['state_dict'])} weights",
        f"epoch {checkpoint['epoch']}, step {checkpoint['global_step']}",
    ]
    for key, name in (("optimizers", "optimizer"), ("lr_schedulers", "scheduler")):
        count = len(checkpoint.get(key, ()))
        converted_entries += [f"{count} {name}{'s' * (count > 1)}"] if count else []
    return Conversion(checkpoint=checkpoint, entries=converted_entries, dropped=[])
