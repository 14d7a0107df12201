"""What there is to say about a checkpoint without loading its tensors."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.portable.layout import MANIFEST, STATE
from dstrat.builtin.checkpoint.portable.newest import resolved
from dstrat.builtin.checkpoint.portable.opened_folder import OpenedFolder
from dstrat.builtin.checkpoint.portable.storage import file_size

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dstrat.builtin.checkpoint.place import Place
    from dstrat.builtin.checkpoint.portable.index import TensorEntry
    from dstrat.builtin.checkpoint.portable.manifest import Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFacts:
    """A checkpoint, its tensors by name, shape and dtype only.

    Attributes:
        path: The folder.
        manifest: What wrote it, and its files.
        values: The plain values, as JSON holds them.
        tensors: The tensors, by name.
        num_bytes: Size of all files.
    """

    path: Place
    manifest: Manifest
    values: Mapping[str, Any]
    tensors: Mapping[str, TensorEntry]
    num_bytes: int

    @property
    def step(self) -> int | None:
        """Number of optimizer steps that were done; None where it is no checkpoint of a training."""
        return self._count("global_step")

    @property
    def epoch(self) -> int | None:
        """The epoch that it was saved in."""
        return self._count("epoch")

    @property
    def num_tensor_bytes(self) -> int:
        """Size of the tensors that are stored."""
        return sum(entry.num_bytes for entry in self.tensors.values() if entry.same_as is None)

    @property
    def created(self) -> str:
        """When it was completed."""
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
    with OpenedFolder(resolved(path)) as folder:
        size = sum(folder.sizes.values()) + file_size(folder.path / MANIFEST)
        return CheckpointFacts(
            path=folder.path,
            manifest=folder.manifest,
            values=folder.document(STATE),
            tensors=folder.index(),
            num_bytes=size,
        )
