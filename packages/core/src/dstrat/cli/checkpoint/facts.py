"""Facts about a checkpoint that need none of its tensors."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.portable.layout import MANIFEST, SAVED_WITH, STATE
from dstrat.builtin.checkpoint.portable.newest import resolved
from dstrat.builtin.checkpoint.portable.opened_folder import OpenedFolder
from dstrat.builtin.checkpoint.portable.storage import file_size
from dstrat.cli.checkpoint.content import content_of_file, is_single_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.builtin.checkpoint.place import Place
    from dstrat.builtin.checkpoint.portable.index import TensorEntry
    from dstrat.builtin.checkpoint.portable.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFacts:
    """A checkpoint, its tensors by name, shape and dtype only.

    Attributes:
        path: The folder or file.
        manifest: What wrote it, and its files; None of a single file.
        values: The plain values, as JSON holds them.
        tensors: The tensors, by name.
        num_bytes: Size of all files.
        unknown: The classes of what cannot be read, by the names of the places.
    """

    path: Place
    manifest: Manifest | None
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    num_bytes: int
    unknown: Mapping[str, str]

    @property
    def step(self) -> int | None:
        """Number of optimizer steps that were done; None where it is no checkpoint of a training."""
        return self._count("global_step")

    @property
    def epoch(self) -> int | None:
        """The epoch that it was saved in."""
        return self._count("epoch")

    @property
    def strategy(self) -> str:
        """Alias of the strategy that wrote it; empty where it was not said."""
        if self.manifest is not None:
            return self.manifest.strategy
        value = self.values.get(SAVED_WITH) if isinstance(self.values, dict) else None
        return value if isinstance(value, str) else ""

    @property
    def world_size(self) -> int | None:
        """Number of ranks that wrote it; None where it was not said."""
        return self._count("world_size") if self.manifest is None else self.manifest.world_size

    @property
    def num_tensor_bytes(self) -> int:
        """Size of the tensors that are stored."""
        return sum(entry.num_bytes for entry in self.tensors.values() if entry.same_as is None)

    @property
    def created(self) -> str:
        """When it was completed; empty where it was not said."""
        if self.manifest is None:
            return ""
        moment = dt.datetime.fromtimestamp(self.manifest.created_ns / 1e9, tz=dt.timezone.utc)
        return moment.strftime("%Y-%m-%d %H:%M:%S UTC")

    def _count(self, key: str) -> int | None:
        value = self.values.get(key) if isinstance(self.values, dict) else None
        return value if type(value) is int else None


def facts_of(path: Place) -> CheckpointFacts:
    """Read what a checkpoint says of itself.

    Raises:
        CheckpointError: It is none, or is damaged.
    """
    if is_single_file(path):
        content = content_of_file(path)
        return CheckpointFacts(
            path=path,
            manifest=None,
            values=content.values,
            tensors=content.tensors,
            num_bytes=file_size(path),
            unknown=content.unknown,
        )
    with OpenedFolder(resolved(path)) as folder:
        size = sum(folder.sizes.values()) + file_size(folder.path / MANIFEST)
        return CheckpointFacts(
            path=folder.path,
            manifest=folder.manifest,
            values=folder.document(STATE),
            tensors=folder.index(),
            num_bytes=size,
            unknown={},
        )
