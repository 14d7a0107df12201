"""``dstrat checkpoint verify``: comparison of a checkpoint with its checksums."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dstrat.checkpoint.portable.format import BUCKET, MANIFEST, STATE
from dstrat.checkpoint.portable.newest import is_zip, resolve
from dstrat.checkpoint.portable.reader import CheckpointReader
from dstrat.checkpoint.portable.storage import map_in_threads, storage_of
from dstrat.cli.checkpoint.diff import is_single_file
from dstrat.cli.checkpoint.group import CHECKPOINT_PATH, progress_bar, readable_size
from dstrat.cli.output import json_option, print_json
from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from dstrat.checkpoint.paths import CheckpointPath


@click.command(short_help="Read a checkpoint, and compare all checksums.")
@click.argument("path", type=CHECKPOINT_PATH)
@json_option
@click.pass_context
def verify(ctx: click.Context, path: CheckpointPath, as_json: bool) -> None:
    """Read a checkpoint and compare all checksums; exit with 1 if something is wrong.

    A single file has only those that torch.save writes.
    """
    if is_single_file(path):
        _verify_file(ctx, path, as_json=as_json)
    with CheckpointReader(resolve(path)) as folder:
        num_bytes = sum(folder.sizes.values())
        with progress_bar("verifying", num_bytes) as advance:
            problems = [*_damage(folder, advance), *_unlisted_files(folder)]
        if not problems:  # damaged bytes would be reported twice
            problems = list(_contradictions(folder))
    if as_json:
        print_json({"path": str(folder.path), "bytes": num_bytes, "problems": problems})
    elif problems:
        click.echo("\n".join(problems))
    else:
        click.echo(f"{folder.path}: all {len(folder.manifest.files) + 1} files are whole ({readable_size(num_bytes)})")
    ctx.exit(1 if problems else 0)


def _verify_file(ctx: click.Context, path: CheckpointPath, *, as_json: bool) -> None:
    """Read a file of torch, print its problems, and exit."""
    from dstrat.checkpoint.torch_file import StandInCheckpointIO

    num_bytes = storage_of(path).file_size(path)
    problems = _complaints(lambda: StandInCheckpointIO().load_checkpoint(str(path)))
    if as_json:
        print_json({"path": str(path), "bytes": num_bytes, "problems": problems})
    elif problems:
        click.echo("\n".join(problems))
    else:
        checksums = "its checksums, those of torch.save, are right" if is_zip(path) else "it has no checksums"
        click.echo(f"{path}: the file can be read, and {checksums} ({readable_size(num_bytes)})")
    ctx.exit(1 if problems else 0)


def _damage(folder: CheckpointReader, advance: Callable[[int], None]) -> Iterator[str]:
    """Yield the problems of each file's bytes."""
    for name in folder.sizes:
        yield from _complaints(lambda name=name: _read(folder, name, advance))  # type: ignore[misc]  # it binds the name


def _read(folder: CheckpointReader, name: str, advance: Callable[[int], None]) -> None:
    file, size = folder.file(name), folder.sizes[name]

    def read(begin: int) -> None:
        count = min(BUCKET, size - begin)
        file.read_into(memoryview(bytearray(count)), begin)  # compares the checksums
        advance(count)

    map_in_threads(read, range(0, size, BUCKET))  # in blocks, so that a file larger than memory can be read


def _unlisted_files(folder: CheckpointReader) -> Iterator[str]:
    entries: Iterable[CheckpointPath] = folder.path.iterdir()
    for path in sorted(entries, key=str):
        if path.name not in folder.sizes and path.name != MANIFEST:
            yield f"{path}: the manifest does not list it, so it was put there later; it is never read"


def _contradictions(folder: CheckpointReader) -> Iterator[str]:
    """Yield the problems of values and index, whose bytes are right."""
    yield from _complaints(lambda: folder.document(STATE))
    yield from _complaints(folder.index)


def _complaints(read: Callable[[], Any]) -> list[str]:
    try:
        read()
    except CheckpointError as error:
        return [str(error)]
    return []
