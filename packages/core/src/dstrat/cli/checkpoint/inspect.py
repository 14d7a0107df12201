"""``dstrat checkpoint inspect``: content of a checkpoint."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import click

from dstrat.checkpoint.portable.format import MANIFEST, PER_RANK, SAVED_WITH, STATE
from dstrat.checkpoint.portable.newest import resolve
from dstrat.checkpoint.portable.reader import CheckpointReader
from dstrat.checkpoint.portable.storage import storage_of
from dstrat.cli.checkpoint.diff import content_of_file, is_single_file
from dstrat.cli.checkpoint.group import CHECKPOINT_PATH, readable_size
from dstrat.cli.output import json_option, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from dstrat.checkpoint.paths import CheckpointPath
    from dstrat.checkpoint.portable.format import Manifest
    from dstrat.checkpoint.portable.index import TensorEntry

# In a single file the state of rank 0 alone, without its number.
_RANDOM = re.compile(rf"{PER_RANK}/(\d+/)?(beginning/)?(random|device_random|generators)(/|$)")


@click.command(short_help="Show what is in a checkpoint.")
@click.argument("path", type=CHECKPOINT_PATH)
@json_option
def inspect(path: CheckpointPath, as_json: bool) -> None:
    """Show what is in a checkpoint, without loading its tensors.

    The states of random generators are one row; --json lists each.
    """
    facts = facts_of(path)
    if as_json:
        print_json(_as_dict(facts))
        return
    print_table(list(_summary(facts)))
    click.echo()
    if facts.tensors:
        print_table(list(_rows(facts)), ["tensor", "shape", "dtype", "size", ""], unbroken=("shape", "dtype", "size"))


def _rows(facts: CheckpointFacts) -> Iterator[tuple[str, ...]]:
    """Yield a row for each tensor, and one for all of the generators of random numbers."""
    random = {name: entry for name, entry in facts.tensors.items() if _RANDOM.match(name)}
    for name, entry in facts.tensors.items():
        if name not in random:
            yield name, _shape(entry), entry.dtype, readable_size(entry.num_bytes), _remark(entry)
    if random:
        size = sum(entry.num_bytes for entry in random.values() if entry.same_as is None)
        yield "random state", f"{len(random)} tensors", "", readable_size(size), ""


def _summary(facts: CheckpointFacts) -> Iterator[tuple[str, str]]:
    manifest = facts.manifest
    yield "checkpoint", str(facts.path)
    if facts.step is not None:
        yield "step", str(facts.step)
    if facts.epoch is not None:
        yield "epoch", str(facts.epoch)
    if facts.world_size is not None:
        ranks = f"{facts.world_size} rank{'s' * (facts.world_size != 1)}"
        yield "saved by", f"{facts.strategy} on {ranks}" if facts.strategy else ranks
    if manifest is None:
        yield "size", f"{readable_size(facts.num_bytes)} in one file of torch"
    else:
        yield "saved at", facts.created
        yield "versions", f"dstrat {manifest.dstrat}, torch {manifest.torch}"
        yield "size", f"{readable_size(facts.num_bytes)} in {len(manifest.files) + 1} files"  # 1 is the manifest
    yield "tensors", f"{len(facts.tensors)} of {readable_size(facts.num_tensor_bytes)}"
    yield "values", ", ".join(facts.values) if isinstance(facts.values, dict) else ""
    if facts.unknown:
        yield "not read", ", ".join(f"{name} (of {kind})" for name, kind in facts.unknown.items())


def _shape(entry: TensorEntry) -> str:
    return " x ".join(map(str, entry.shape)) or "scalar"


def _remark(entry: TensorEntry) -> str:
    if entry.same_as is not None:
        return f"the same as {entry.same_as}"
    return f"in {len(entry.pieces)} pieces" if len(entry.pieces) > 1 else ""


def _as_dict(facts: CheckpointFacts) -> dict[str, Any]:
    manifest = facts.manifest
    return {
        "path": str(facts.path),
        "step": facts.step,
        "epoch": facts.epoch,
        "strategy": facts.strategy,
        "world_size": facts.world_size,
        "created_ns": manifest and manifest.created_ns,
        "dstrat": manifest and manifest.dstrat,
        "torch": manifest and manifest.torch,
        "bytes": facts.num_bytes,
        "tensor_bytes": facts.num_tensor_bytes,
        "files": {name: record.size for name, record in manifest.files.items()} if manifest else {},
        "not_read": dict(facts.unknown),
        "tensors": {
            name: {
                "dtype": entry.dtype,
                "shape": list(entry.shape),
                "bytes": entry.num_bytes,
                "pieces": len(entry.pieces),
                "same_as": entry.same_as,
            }
            for name, entry in facts.tensors.items()
        },
    }


# Facts about a checkpoint, without values of its tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFacts:
    """The values of a checkpoint, and names, shapes and dtypes of its tensors.

    Attributes:
        path: The folder or file.
        manifest: The manifest of a folder; None of a single file.
        values: The plain values, as in the JSON of a folder.
        tensors: The entries of the tensors, by name.
        num_bytes: Size of all files in bytes.
        unknown: Classes of values that cannot be read, by the names of the values.
    """

    path: CheckpointPath
    manifest: Manifest | None
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    num_bytes: int
    unknown: Mapping[str, str]

    @property
    def step(self) -> int | None:
        """Number of optimizer steps; None if it is no checkpoint of a training."""
        return self._count("global_step")

    @property
    def epoch(self) -> int | None:
        """Index of the epoch in which it was saved; None if it is unknown."""
        return self._count("epoch")

    @property
    def strategy(self) -> str:
        """Alias of the strategy that saved it; empty if it is unknown."""
        if self.manifest is not None:
            return self.manifest.strategy
        value = self.values.get(SAVED_WITH) if isinstance(self.values, dict) else None
        return value if isinstance(value, str) else ""

    @property
    def world_size(self) -> int | None:
        """Number of ranks that saved it; None if it is unknown."""
        return self._count("world_size") if self.manifest is None else self.manifest.world_size

    @property
    def num_tensor_bytes(self) -> int:
        """Size of the stored tensors in bytes; shared ones count once."""
        return sum(entry.num_bytes for entry in self.tensors.values() if entry.same_as is None)

    @property
    def created(self) -> str:
        """Time when it was completed, in UTC; empty if it is unknown."""
        if self.manifest is None:
            return ""
        moment = dt.datetime.fromtimestamp(self.manifest.created_ns / 1e9, tz=dt.timezone.utc)
        return moment.strftime("%Y-%m-%d %H:%M:%S UTC")

    def _count(self, key: str) -> int | None:
        value = self.values.get(key) if isinstance(self.values, dict) else None
        return value if type(value) is int else None  # a file of another program may have anything there


def facts_of(path: CheckpointPath) -> CheckpointFacts:
    """Read the facts about a checkpoint.

    Raises:
        CheckpointError: It is no checkpoint, or is damaged.
    """
    if is_single_file(path):
        content = content_of_file(path)
        return CheckpointFacts(
            path=path,
            manifest=None,
            values=content.values,
            tensors=content.tensors,
            num_bytes=storage_of(path).file_size(path),
            unknown=content.unknown,
        )
    with CheckpointReader(resolve(path)) as folder:
        size = sum(folder.sizes.values()) + storage_of(folder.path).file_size(folder.path / MANIFEST)
        return CheckpointFacts(
            path=folder.path,
            manifest=folder.manifest,
            values=folder.document(STATE),
            tensors=folder.index(),
            num_bytes=size,
            unknown={},
        )
