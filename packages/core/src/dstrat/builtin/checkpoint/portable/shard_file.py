"""Writing one rank's parts of tensors as a safetensors file, in parallel, with checksums on the way."""

from __future__ import annotations

import bisect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.place import RemotePath
from dstrat.builtin.checkpoint.portable.checksum import block_checksums
from dstrat.builtin.checkpoint.portable.dtypes import DTYPES, dtype_name
from dstrat.builtin.checkpoint.portable.layout import BUCKET
from dstrat.builtin.checkpoint.portable.manifest import FileRecord
from dstrat.builtin.checkpoint.portable.output import OutputFile
from dstrat.builtin.checkpoint.portable.parallel import map_in_threads
from dstrat.builtin.checkpoint.portable.strict_json import dump_json
from dstrat.builtin.checkpoint.portable.upload import UploadedFile

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from dstrat.builtin.checkpoint.place import Place
    from dstrat.builtin.checkpoint.portable.payload import Payload


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardFile:
    """Where everything goes in a file.

    Attributes:
        header: The file's first bytes.
        payloads: What follows, without gaps.
        begins: Position of the first byte of each.
    """

    header: bytes
    payloads: Sequence[Payload]
    begins: Sequence[int]

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return self.begins[-1] + self.payloads[-1].num_bytes if self.payloads else len(self.header)

    def views(self, begin: int, end: int) -> list[memoryview]:
        """Return the bytes of the file between two positions."""
        found = [memoryview(self.header)[begin:end]] if begin < len(self.header) else []
        position = max(0, bisect.bisect_right(self.begins, begin) - 1)
        for payload, first in zip(self.payloads[position:], self.begins[position:], strict=True):
            if first >= end:
                break
            low, high = max(begin - first, 0), min(end - first, payload.num_bytes)
            if low < high:
                found.append(payload.view(low, high))
        return found


def arrange(payloads: Sequence[Payload]) -> ShardFile:
    """Return where each part goes; parts with larger elements come first, so that all are aligned."""
    ordered = sorted(
        payloads, key=lambda payload: (-DTYPES[dtype_name(payload.dtype)].size, payload.name, payload.starts)
    )
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    ends, reached = [], 0
    for payload in ordered:
        entries[_key(payload, entries)] = _header_entry(payload, reached)
        reached += payload.num_bytes
        ends.append(reached)
    text = dump_json(entries)
    text += b" " * (-len(text) % 64)
    header = len(text).to_bytes(8, "little") + text
    begins = [len(header) + end - payload.num_bytes for payload, end in zip(ordered, ends, strict=True)]
    return ShardFile(header=header, payloads=ordered, begins=begins)


def _key(payload: Payload, taken: dict[str, Any]) -> str:
    """Return the name in the header: the tensor's, and where in the tensor a part begins that is not its first."""
    if not any(payload.starts) and payload.name not in taken:
        return payload.name
    return f"{payload.name}[{','.join(map(str, payload.starts))}]"


def _header_entry(payload: Payload, begin: int) -> dict[str, Any]:
    facts = DTYPES[dtype_name(payload.dtype)]
    shape = [*payload.shape, facts.columns] if facts.columns > 1 else list(payload.shape)
    return {"dtype": facts.code, "shape": shape, "data_offsets": [begin, begin + payload.num_bytes]}


def write_shard_file(file: ShardFile, path: Place) -> FileRecord:
    """Write the file so that it survives a crash, and return what the manifest says of it.

    Raises:
        OSError: The disk is full, or the like.
    """
    checksums = _uploaded(file, path) if isinstance(path, RemotePath) else _on_disk(file, path)
    return FileRecord(size=file.size, checksums="".join(checksums))


def _on_disk(file: ShardFile, path: Path) -> list[str]:
    def write(begin: int) -> str:
        views = _bucket(file, begin)
        output.write(views, begin)
        return block_checksums(views)

    with OutputFile(path, file.size) as output:
        # zlib and the system work without the interpreter's lock.
        checksums = map_in_threads(write, range(0, file.size, BUCKET))
        output.flush()
    return checksums


def _uploaded(file: ShardFile, path: RemotePath) -> list[str]:
    checksums = []
    with UploadedFile(path, file.size) as output:
        for begin in range(0, file.size, BUCKET):
            views = _bucket(file, begin)
            output.write(views)
            checksums.append(block_checksums(views))
    return checksums


def _bucket(file: ShardFile, begin: int) -> list[memoryview]:
    return file.views(begin, min(begin + BUCKET, file.size))
