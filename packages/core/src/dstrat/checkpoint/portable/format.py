"""Portable checkpoint format: names and limits, manifest, checksums, dtypes, strict JSON."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import xxhash

from dstrat.errors import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    import torch

    from dstrat.checkpoint.paths import Place


FORMAT = "dstrat-checkpoint"
FORMAT_VERSION = 1

MANIFEST = "manifest.json"
STATE = "state.json"
INDEX = "tensors.json"
LAST = "last"
"""The pointer beside the checkpoints: a file that holds the name of the newest one."""

PER_RANK = "per_rank"
"""The key of a checkpoint under which each rank keeps what is only its own."""
SAVED_WITH = "saved_with"
"""The key under which a checkpoint names the strategy that it was saved with; the manifest names it too."""

MEBIBYTE = 1024 * 1024
BLOCK = MEBIBYTE
"""Bytes that share one checksum."""
BUCKET = 8 * MEBIBYTE
"""Bytes that one thread handles at a time; a multiple of :data:`BLOCK`."""
THREADS = 4
LARGEST_JSON = 256 * MEBIBYTE
DEEPEST_NESTING = 100
LARGEST_DIMENSIONS = 64

_FILE_NAME = re.compile(r"state\.json|tensors\.json|rank-[0-9]{5,7}\.(json|safetensors)")


def rank_file(rank: int, kind: str) -> str:
    """Return the name of a file that one rank writes; the kind is ``"json"`` or ``"safetensors"``."""
    return f"rank-{rank:05d}.{kind}"


def is_file_name(name: object) -> bool:
    """Return whether a manifest may list a file of that name."""
    return isinstance(name, str) and _FILE_NAME.fullmatch(name) is not None


# The manifest of a checkpoint: what wrote it, and size and checksums of each file.


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


# Checksums of a file, one for each block, so that a part of it can be verified too.
#
# XXH3 (64 bits) takes a tenth of a second for 1 GiB on one core; an accident to a block goes unnoticed once in 2^64.
# It is no protection against somebody who changes file and checksum together.


DIGITS = 16
"""Hexadecimal digits of one checksum."""


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of one block."""
    return xxhash.xxh3_64_hexdigest(data)


def block_checksums(views: Iterable[memoryview]) -> str:
    """Return the checksums of the blocks of consecutive views that begin at the start of a block."""
    found: list[str] = []
    current, filled = xxhash.xxh3_64(), 0
    for view in views:
        done = 0
        while done < len(view):
            part = view[done : done + BLOCK - filled]
            current.update(part)
            done, filled = done + len(part), filled + len(part)
            if filled == BLOCK:
                found.append(current.hexdigest())
                current, filled = xxhash.xxh3_64(), 0
    if filled:
        found.append(current.hexdigest())
    return "".join(found)


def num_blocks(size: int) -> int:
    """Return how many blocks a file of so many bytes has."""
    return -(-size // BLOCK)


def expected(checksums: str, block: int) -> str:
    """Return the checksum of one block."""
    return checksums[block * DIGITS : (block + 1) * DIGITS]


# JSON as the format uses it: no constants that are not JSON, no infinite numbers, no key twice, no endless nesting.


def dump_json(value: Any) -> bytes:
    """Return the value as compact ASCII."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).encode("ascii")


def parse_json(data: bytes | bytearray | memoryview) -> Any:
    """Return the value of a document.

    Raises:
        ValueError: It is no JSON, has a key twice or a number that no float holds, or is nested too deeply.
    """
    try:
        text = str(data, "utf-8")
        return json.loads(
            text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite_float
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has the key {twice[:80]!r} twice in one object")
    return found


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not JSON")


def _finite_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"it holds {digits[:80]}, which is too large for a float")
    return number


# The error about a checkpoint that is not as it was written.


def damaged_error(folder: Place, what: str) -> CheckpointError:
    """Return the error; what is wrong is the end of a sentence."""
    return CheckpointError(f"checkpoint {str(folder)!r} is damaged: {what}; load another one")


# The dtypes of tensors in a checkpoint, by their names in torch; known without importing it.


@dataclass(frozen=True, kw_only=True, slots=True)
class DTypeFacts:
    """What a file's header says about a dtype.

    Attributes:
        size: Bytes of one element.
        code: Name of the dtype in a safetensors header; the nearest one where safetensors does not know it.
        columns: Elements of the code that make up one element; more than one adds a last dimension to the header.
    """

    size: int
    code: str
    columns: int = 1


DTYPES = {
    "bool": DTypeFacts(size=1, code="BOOL"),
    "uint8": DTypeFacts(size=1, code="U8"),
    "int8": DTypeFacts(size=1, code="I8"),
    "float8_e5m2": DTypeFacts(size=1, code="F8_E5M2"),
    "float8_e4m3fn": DTypeFacts(size=1, code="F8_E4M3"),
    "float8_e5m2fnuz": DTypeFacts(size=1, code="U8"),
    "float8_e4m3fnuz": DTypeFacts(size=1, code="U8"),
    "float8_e8m0fnu": DTypeFacts(size=1, code="U8"),
    "int16": DTypeFacts(size=2, code="I16"),
    "uint16": DTypeFacts(size=2, code="U16"),
    "float16": DTypeFacts(size=2, code="F16"),
    "bfloat16": DTypeFacts(size=2, code="BF16"),
    "int32": DTypeFacts(size=4, code="I32"),
    "uint32": DTypeFacts(size=4, code="U32"),
    "float32": DTypeFacts(size=4, code="F32"),
    "complex32": DTypeFacts(size=4, code="F16", columns=2),
    "float64": DTypeFacts(size=8, code="F64"),
    "int64": DTypeFacts(size=8, code="I64"),
    "uint64": DTypeFacts(size=8, code="U64"),
    "complex64": DTypeFacts(size=8, code="F32", columns=2),
    "complex128": DTypeFacts(size=16, code="F64", columns=2),
}


@cache
def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


@cache
def dtype_named(name: str) -> torch.dtype:
    """Return the dtype of a name.

    Raises:
        ValueError: There is none in this version of torch.
    """
    import torch

    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")  # noqa: TRY004 - the name is wrong
    return dtype
