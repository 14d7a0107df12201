"""``dstrat checkpoint consolidate``: a checkpoint as one file, for other programs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dstrat.checkpoint.portable.format import PER_RANK
from dstrat.checkpoint.portable.newest import resolve
from dstrat.checkpoint.portable.reader import CheckpointReader
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.cli.checkpoint.diff import is_single_file
from dstrat.cli.checkpoint.group import CHECKPOINT_PATH, progress_bar, readable_size
from dstrat.cli.output import json_option, print_json
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable

    from dstrat.checkpoint.paths import CheckpointPath

_WEIGHTS = "state_dict/"
_TORCH_SUFFIXES = (".pt", ".pth", ".ckpt", ".bin")


@click.command()
@click.argument("path", type=CHECKPOINT_PATH)
@click.argument("output", type=CHECKPOINT_PATH)
@json_option
def consolidate(path: CheckpointPath, output: CheckpointPath, as_json: bool) -> None:
    """Write a checkpoint as one file.

    OUTPUT ends in .safetensors for the module's weights, under their own names; or in .pt, .pth, .ckpt or .bin for
    the whole checkpoint as a file of torch, which loads with weights_only=True.
    """
    if is_single_file(path):
        raise CheckpointError(
            f"{str(path)!r} is one file already, and 'dstrat checkpoint consolidate' takes the folder of a checkpoint"
        )
    check_absent(output)
    write = _write_weights if output.suffix == ".safetensors" else _write_all
    if output.suffix not in (".safetensors", *_TORCH_SUFFIXES):
        raise CheckpointError(
            f"{str(output)!r} ends in {output.suffix!r}: choose .safetensors for the weights alone, or one of "
            f"{', '.join(_TORCH_SUFFIXES)} for all"
        )
    with CheckpointReader(resolve(path)) as folder:
        index = folder.index()
        with progress_bar("reading", sum(entry.num_bytes for entry in index.values())) as advance:
            num_tensors = write(folder, output, advance)
    size = storage_of(output).file_size(output)
    facts = {"output": str(output), "tensors": num_tensors, "bytes": size}
    if as_json:
        print_json(facts)
    else:
        click.echo(f"{output}: {num_tensors} tensors, {readable_size(size)}")


def check_absent(output: CheckpointPath) -> None:
    """Raise :class:`CheckpointError` if the output exists."""
    if storage_of(output).is_occupied(output):
        raise CheckpointError(f"{str(output)!r} exists already: choose another name, or remove it first")


def _write_weights(folder: CheckpointReader, output: CheckpointPath, advance: Callable[[int], None]) -> int:
    from dstrat.checkpoint.portable.load import read_tensors
    from dstrat.checkpoint.portable.payload import Payload
    from dstrat.checkpoint.portable.save import arrange
    from dstrat.parallel.shards import LocalBox

    names = [name for name in folder.index() if name.startswith(_WEIGHTS)]
    if not names:
        raise CheckpointError(f"checkpoint {str(folder.path)!r} has no weights: nothing in it is below 'state_dict'")
    weights = {name.removeprefix(_WEIGHTS): tensor for name, tensor in read_tensors(folder, names, advance).items()}
    payloads = [Payload(name, LocalBox(tensor=tensor, starts=(0,) * tensor.dim())) for name, tensor in weights.items()]
    storage, file = storage_of(output), arrange(payloads)
    with storage.atomic_write(output) as temporary:
        storage.write_buckets(temporary, file.size, file.bucket)
    return len(weights)


def _write_all(folder: CheckpointReader, output: CheckpointPath, advance: Callable[[int], None]) -> int:
    from dstrat.checkpoint.portable.load import load
    from dstrat.checkpoint.torch_file import TorchCheckpointIO

    checkpoint: dict[str, Any] = load(folder, rank=0, world_size=folder.manifest.world_size, advance=advance)
    if folder.manifest.world_size > 1:
        del checkpoint[PER_RANK]  # the state of rank 0 alone, with which several ranks cannot be resumed
    TorchCheckpointIO().save_checkpoint(checkpoint, str(output))
    return len(folder.index())
