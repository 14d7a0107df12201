"""The manifest of a checkpoint: what wrote it, and size and checksums of each file."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dstrat.builtin.checkpoint.portable.checksum import DIGITS, checksum, num_blocks
from dstrat.builtin.checkpoint.portable.layout import BLOCK, FORMAT, FORMAT_VERSION, is_file_name
from dstrat.builtin.checkpoint.portable.strict_json import dump_json, parse_json

if TYPE_CHECKING:
    from collections.abc import Mapping

_ENVELOPE = re.compile(rb'\{"xxh3":"([0-9a-f]{16})","manifest":(\{.*\})\}\n', re.DOTALL)
_CHECKSUMS = re.compile(r"([0-9a-f]{16})*")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """What a file must look like.

    Attributes:
        size: In bytes.
        checksums: Of its blocks, sixteen hexadecimal digits each.
    """

    size: int
    checksums: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """What a checkpoint consists of.

    Attributes:
        files: Every file but the manifest, by name.
        strategy: Alias of the strategy that wrote it; empty where it was not said.
        world_size: Number of ranks that wrote it.
        created_ns: When it was completed, in nanoseconds since the epoch.
        dstrat: Version of dstrat.
        torch: Version of torch.
    """

    files: Mapping[str, FileRecord]
    strategy: str
    world_size: int
    created_ns: int
    dstrat: str
    torch: str

    def to_bytes(self) -> bytes:
        """Return the content of the manifest's file, its own checksum first."""
        body = dump_json(
            {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "dstrat": self.dstrat,
                "torch": self.torch,
                "strategy": self.strategy,
                "world_size": self.world_size,
                "created_ns": self.created_ns,
                "block": BLOCK,
                "files": {name: {"size": file.size, "xxh3": file.checksums} for name, file in self.files.items()},
            }
        )
        return b'{"xxh3":"%s","manifest":%s}\n' % (checksum(body).encode(), body)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Return the manifest that a file holds.

        Raises:
            ValueError: It is not one, is damaged, or comes from a newer version.
        """
        envelope = _ENVELOPE.fullmatch(data)
        if envelope is None:
            raise ValueError("it is not the manifest of a dstrat checkpoint")
        if checksum(envelope[2]) != envelope[1].decode():
            raise ValueError("its checksum does not match")
        body = parse_json(envelope[2])
        _check_version(body)
        return cls(
            files={_name(name): _record(name, record) for name, record in _field(body, "files", dict).items()},
            strategy=_field(body, "strategy", str),
            world_size=_count(body, "world_size"),
            created_ns=_count(body, "created_ns"),
            dstrat=_field(body, "dstrat", str),
            torch=_field(body, "torch", str),
        )


def _check_version(body: dict[str, Any]) -> None:
    if body.get("format") != FORMAT or body.get("block") != BLOCK:
        raise ValueError("it is not the manifest of a dstrat checkpoint")
    if body.get("version") != FORMAT_VERSION:
        raise ValueError(
            f"its format is version {body.get('version')!r} (written by dstrat {body.get('dstrat')!r}), and this "
            f"dstrat reads version {FORMAT_VERSION}: upgrade dstrat"
        )


def _field(body: dict[str, Any], key: str, kind: type) -> Any:
    value = body.get(key)
    if type(value) is not kind:
        raise ValueError(f"its {key!r} is {value!r:.80} and not of type {kind.__name__}")
    return value


def _count(body: dict[str, Any], key: str) -> int:
    value: int = _field(body, key, int)
    if value < 0:
        raise ValueError(f"its {key!r} is negative")
    return value


def _name(name: str) -> str:
    if not is_file_name(name):
        raise ValueError(f"it lists a file {name[:80]!r}, and a checkpoint has no file of such a name")
    return name


def _record(name: str, record: Any) -> FileRecord:
    if type(record) is not dict:
        raise ValueError(f"its record of {name} is no object")
    size = _count(record, "size")
    checksums: str = _field(record, "xxh3", str)
    if not _CHECKSUMS.fullmatch(checksums) or len(checksums) != DIGITS * num_blocks(size):
        raise ValueError(f"its checksums of {name} do not fit {size} bytes")
    return FileRecord(size=size, checksums=checksums)
