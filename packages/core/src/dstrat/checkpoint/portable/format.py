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

    from dstrat.checkpoint.paths import CheckpointPath


FORMAT = "dstrat-checkpoint"
FORMAT_VERSION = 1

MANIFEST = "manifest.json"
STATE = "state.json"
INDEX = "tensors.json"
LAST = "last"
"""The pointer beside the checkpoints: a file that holds the name of the newest one."""

PER_RANK = "per_rank"
"""The key of a checkpoint under which each rank has its own values."""
SAVED_WITH = "saved_with"
"""The key of a checkpoint for the alias of the strategy that saves it; the manifest has it too."""

MEBIBYTE = 1024 * 1024
BLOCK = MEBIBYTE
"""Bytes with one checksum."""
BUCKET = 8 * MEBIBYTE
"""Bytes that a thread reads or writes at a time; a multiple of :data:`BLOCK`."""
LARGEST_JSON = 256 * MEBIBYTE
"""Bytes of a JSON file, so that a damaged checkpoint cannot make its reader allocate any amount of memory."""
DEEPEST_NESTING = 100
LARGEST_DIMENSIONS = 64


def rank_file(rank: int, kind: str) -> str:
    """Return the name of a rank's file of a kind: ``"json"`` or ``"safetensors"``."""
    return f"rank-{rank:05d}.{kind}"


# Manifest: versions, strategy, and the size and checksums of each file


# The checksum of the manifest comes first, over exactly the bytes that follow: no need to dump JSON in the same form.
_ENVELOPE = re.compile(rb'\{"xxh3":"([0-9a-f]{16})","manifest":(\{.*\})\}\n', re.DOTALL)
_CHECKSUMS = re.compile(r"([0-9a-f]{16})*")
# No other files, so that a manifest cannot name a path outside its folder, such as "../x".
_FILE_NAME = re.compile(r"state\.json|tensors\.json|rank-[0-9]{5,7}\.(json|safetensors)")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """Size and checksums of a file.

    Attributes:
        size: In bytes.
        checksums: Of the file's blocks, :data:`DIGITS` hexadecimal digits each.
    """

    size: int
    checksums: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """The contents and origin of a checkpoint.

    Attributes:
        files: Every file except the manifest, by name.
        strategy: Alias of the strategy that saved the checkpoint; empty if it is not known.
        world_size: Number of ranks that saved it.
        created_ns: Time of its completion, in nanoseconds since the epoch.
        dstrat: Version of dstrat that saved it.
        torch: Version of torch that saved it.
    """

    files: Mapping[str, FileRecord]
    strategy: str
    world_size: int
    created_ns: int
    dstrat: str
    torch: str

    def to_bytes(self) -> bytes:
        """Return the content of the manifest file, which begins with the manifest's own checksum."""
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
        """Return the manifest of a file's content.

        Raises:
            ValueError: The content is not a manifest, or is damaged.
            UnknownVersionError: It has another version of the format.
        """
        envelope = _ENVELOPE.fullmatch(data)
        if envelope is None:
            raise ValueError("it is not the manifest of a dstrat checkpoint")
        # Before the fields are believed: they hold the checksums and sizes of everything else.
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


class UnknownVersionError(ValueError):
    """The manifest has a version of the format that this dstrat cannot read."""


def _check_version(body: dict[str, Any]) -> None:
    if body.get("format") != FORMAT:
        raise ValueError("it is not the manifest of a dstrat checkpoint")
    # Before any other field, which may mean something else in another version.
    if body.get("version") != FORMAT_VERSION:
        raise UnknownVersionError(
            f"its format is version {body.get('version')!r} (written by dstrat {body.get('dstrat')!r}), and this "
            f"dstrat reads version {FORMAT_VERSION}: upgrade dstrat"
        )
    if body.get("block") != BLOCK:
        raise ValueError(f"its 'block' is {body.get('block')!r:.80}, and version {FORMAT_VERSION} has {BLOCK}")


def _field(body: dict[str, Any], key: str, kind: type) -> Any:
    value = body.get(key)
    if type(value) is not kind:  # not isinstance: true is an int in Python, and would pass for a size
        raise ValueError(f"its {key!r} is {value!r:.80} and not of type {kind.__name__}")
    return value


def _count(body: dict[str, Any], key: str) -> int:
    value: int = _field(body, key, int)
    if value < 0:
        raise ValueError(f"its {key!r} is negative")
    return value


def _name(name: str) -> str:
    if not _FILE_NAME.fullmatch(name):
        raise ValueError(f"it lists a file {name[:80]!r}, and a checkpoint has no file of such a name")
    return name


def _record(name: str, record: Any) -> FileRecord:
    if type(record) is not dict:
        raise ValueError(f"its record of {name} is no object")
    size = _count(record, "size")
    checksums: str = _field(record, "xxh3", str)
    # A size is believed only with a checksum for each of its blocks: to claim a terabyte takes 16 MiB of them.
    if not _CHECKSUMS.fullmatch(checksums) or len(checksums) != DIGITS * num_blocks(size):
        raise ValueError(f"its checksums of {name} do not fit {size} bytes")
    return FileRecord(size=size, checksums=checksums)


# Checksums, one for each block, so that a shard of a file can be verified without reading the rest
#
# XXH3 (64 bits) takes a tenth of a second for 1 GiB on one core, and misses a damaged block once in 2^64.  It protects
# against accidents, not against an attacker, who can change the checksum too.


DIGITS = 16
"""Hexadecimal digits of a checksum."""


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the checksum of a block."""
    return xxhash.xxh3_64_hexdigest(data)


class BlockChecksum:
    """The checksum of a block that is in several views."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_64()

    def update(self, data: memoryview) -> None:
        """Add the next bytes of the block."""
        self._state.update(data)

    def digest(self) -> str:
        """Return the checksum of the bytes so far."""
        digits: str = self._state.hexdigest()
        return digits


def block_checksums(views: Iterable[memoryview]) -> str:
    """Return the checksums of consecutive views, of which the first begins at the start of a block."""
    digests: list[str] = []
    current, filled = xxhash.xxh3_64(), 0
    for view in views:
        done = 0
        while done < len(view):
            chunk = view[done : done + BLOCK - filled]
            current.update(chunk)
            done, filled = done + len(chunk), filled + len(chunk)
            if filled == BLOCK:
                digests.append(current.hexdigest())
                current, filled = xxhash.xxh3_64(), 0
    if filled:
        digests.append(current.hexdigest())
    return "".join(digests)


def num_blocks(size: int) -> int:
    """Return the number of blocks of a file, from its size in bytes."""
    return -(-size // BLOCK)


def checksum_of_block(checksums: str, block: int) -> str:
    """Return the checksum of a block from those of its file."""
    return checksums[block * DIGITS : (block + 1) * DIGITS]


# Strict JSON: no NaN or Infinity, no duplicate keys, no numbers beyond a float, no unlimited nesting


# Made once: json.dumps and json.loads make a new one in each call that has options.
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def dump_json(value: Any) -> bytes:
    """Return the value as compact ASCII."""
    return _ENCODER.encode(value).encode("ascii")


def parse_json(data: bytes | bytearray | memoryview) -> Any:
    """Return the value of a document.

    Raises:
        ValueError: The document is not JSON in ASCII, has a duplicate key or a number beyond a float, or is too deep.
    """
    try:
        return _DECODER.decode(str(data, "ascii"))
    except UnicodeDecodeError as error:
        raise ValueError("it is not JSON in ASCII") from error
    except RecursionError:  # a few thousand "[" are enough
        raise ValueError("it is nested too deeply") from None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    # json takes the last of equal keys, other parsers the first: a file must not mean two things.
    result = dict(pairs)
    if len(result) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise ValueError(f"it has the key {twice[:80]!r} twice in one object")
    return result


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"it holds {name}, which is not JSON")


def _finite_float(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):  # json reads 1e999 as inf, though JSON has no infinity
        raise ValueError(f"it holds {digits[:80]}, which is too large for a float")
    return number


_DECODER = json.JSONDecoder(
    object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant, parse_float=_finite_float
)


# Errors


def damaged_error(folder: CheckpointPath, problem: str) -> CheckpointError:
    """Return the error about a damaged checkpoint; the problem completes its sentence."""
    return CheckpointError(f"checkpoint {str(folder)!r} is damaged: {problem}; load another one")


# Dtypes of tensors, by their names in torch; without importing torch, as inspection works without it


@dataclass(frozen=True, kw_only=True, slots=True)
class DTypeFacts:
    """The representation of a dtype in a safetensors file.

    Attributes:
        size: Bytes of one element.
        code: Name of the dtype in the header; one of the same size for dtypes that safetensors lacks.
        columns: Elements of the code in one element; if more than 1, the header has another dimension of this size.
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
        ValueError: This version of torch has no such dtype.
    """
    import torch

    dtype = getattr(torch, name, None)  # the name is from a file, and may be that of a function
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch {torch.__version__} has no dtype {name!r}")  # noqa: TRY004 - the name is wrong
    return dtype
