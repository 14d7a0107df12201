"""The dtypes of tensors in a checkpoint, by their names in torch; known without importing it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


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


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype, such as ``"float32"``."""
    return str(dtype).removeprefix("torch.")


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
