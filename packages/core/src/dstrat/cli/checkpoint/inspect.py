"""``dstrat checkpoint inspect``: what is in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from dstrat.cli.checkpoint.facts import facts_of
from dstrat.cli.checkpoint.place import PLACE
from dstrat.cli.checkpoint.sizes import readable_size
from dstrat.cli.output import json_option, print_json, print_table

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dstrat.builtin.checkpoint.place import Place
    from dstrat.builtin.checkpoint.portable.index import TensorEntry
    from dstrat.cli.checkpoint.facts import CheckpointFacts


@click.command()
@click.argument("path", type=PLACE)
@json_option
def inspect(path: Place, as_json: bool) -> None:
    """Show what is in a checkpoint, without loading its tensors."""
    facts = facts_of(path)
    if as_json:
        print_json(_as_dict(facts))
        return
    print_table(list(_summary(facts)))
    click.echo()
    if facts.tensors:
        rows = [
            (name, _shape(entry), entry.dtype, readable_size(entry.num_bytes), _remark(entry))
            for name, entry in facts.tensors.items()
        ]
        print_table(rows, ["tensor", "shape", "dtype", "size", ""])


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
        yield "size", f"{readable_size(facts.num_bytes)} in {len(manifest.files) + 1} files"
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
