"""Encoding of nested values as JSON, without loss: types that JSON lacks are tagged, tensors are separated."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from dstrat.checkpoint.portable.decode import TAG, name_of
from dstrat.checkpoint.portable.format import DEEPEST_NESTING, dtype_name, dump_json
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard

if TYPE_CHECKING:
    from collections.abc import Callable

_ONLY_STRINGS = frozenset({str})
_PLAIN = (type(None), bool, str)
_SAFE_INTEGERS = range(-(2**63), 2**63)
_NUMBERS = "biufc"

# By the exact type, here and below: a subclass would come back as its base class.
_SEQUENCES: dict[type, str] = {list: "", tuple: "tuple", torch.Size: "size"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "ordered", Counter: "counter"}
_SETS: dict[type, str] = {set: "set", frozenset: "frozenset"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A nested value, separated into JSON and tensors.

    Attributes:
        value: The value as JSON, with a tagged name in place of each tensor.
        tensors: The tensors, by name.
    """

    value: Any
    tensors: dict[str, Any]


def encode(value: Any, *, keys: tuple[Any, ...] = ()) -> Encoded:
    """Encode a nested value as JSON and tensors.

    Args:
        value: Of None, bool, int, float, str, bytes, complex, list, tuple, dict, OrderedDict, Counter, set, frozenset,
            numpy's numbers and arrays of them, torch's dtypes, devices, sizes and tensors.
        keys: The keys of the checkpoint that lead to the value; names of tensors begin with them.

    Raises:
        CheckpointError: A value is of another type; the message has its name.
    """
    tensors: dict[str, Any] = {}
    return Encoded(value=_encode(value, keys, tensors), tensors=tensors)


def _encode(value: Any, keys: tuple[Any, ...], tensors: dict[str, Any]) -> Any:
    """Return a value as JSON, and add its tensors by name."""
    kind = type(value)
    if kind in _SCALARS:
        return _SCALARS[kind](value)
    # Without a limit, a value that holds itself would end in a RecursionError.
    if len(keys) > DEEPEST_NESTING:
        name = name_of(keys)[:200]
        raise CheckpointError(f"{name!r} is nested more than {DEEPEST_NESTING} levels deep, or holds itself")
    # A dict with the key of tags would be taken for a tagged value.
    if kind in _SEQUENCES or (kind is dict and set(map(type, value)) <= _ONLY_STRINGS and TAG not in value):
        items = (
            item
            # Tested before a call for each item, since most values of a checkpoint are of types that JSON has.
            if type(item) in _PLAIN or (type(item) is int and item in _SAFE_INTEGERS)
            else _encode(item, (*keys, key), tensors)
            for key, item in (value.items() if kind is dict else enumerate(value))
        )
        if kind is dict:
            return dict(zip(value, items, strict=True))
        return [*items] if kind is list else {TAG: _SEQUENCES[kind], "items": [*items]}
    if isinstance(value, (Tensor, FlatShard)):
        name = name_of(keys)
        if name in tensors:  # the keys 1 and "1" of a dict have one name
            raise CheckpointError(f"two tensors of the checkpoint are called {name!r}: give one of them another key")
        tensors[name] = value
        return {TAG: "tensor", "name": name}
    return _tagged(value, keys, tensors)


def _tagged(value: Any, keys: tuple[Any, ...], tensors: dict[str, Any]) -> dict[str, Any]:
    kind = type(value)
    if isinstance(value, (np.generic, np.ndarray)):
        return _numpy(value, keys)
    if kind in _MAPPINGS:
        pairs = [
            [_encode(key, (*keys, "(a key)"), tensors), _encode(item, (*keys, key), tensors)]
            for key, item in value.items()
        ]
        return {TAG: _MAPPINGS[kind], "items": pairs}
    if kind in _SETS:
        # Sorted, as the order of a set of str differs between processes.
        items = sorted((_encode(item, (*keys, "(an item)"), tensors) for item in value), key=dump_json)
        return {TAG: _SETS[kind], "items": items}
    raise _refusal(value, keys)


def _int(value: int) -> Any:
    # As hex, since Python refuses to parse decimal numbers of more than 4300 digits.
    return value if value in _SAFE_INTEGERS else {TAG: "int", "hex": hex(value)}


def _float(value: float) -> Any:
    return value if math.isfinite(value) else {TAG: "float", "name": repr(value)}


_SCALARS: dict[type, Callable[[Any], Any]] = {
    **dict.fromkeys(_PLAIN, lambda value: value),
    int: _int,
    float: _float,
    complex: lambda value: {TAG: "complex", "parts": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {TAG: "bytes", "base64": _base64(value)},
    torch.dtype: lambda value: {TAG: "dtype", "name": dtype_name(value)},
    torch.device: lambda value: {TAG: "device", "name": str(value)},
}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _numpy(value: Any, keys: tuple[Any, ...]) -> dict[str, Any]:
    array = np.asarray(value)
    # "g" and "G" are long doubles, whose size depends on the platform.
    if array.dtype.kind not in _NUMBERS or array.dtype.itemsize > 16 or array.dtype.char in "gG":
        raise _refusal(value, keys)
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    return {
        TAG: "ndarray" if isinstance(value, np.ndarray) else "numpy",
        "dtype": little.dtype.str,
        "shape": array.shape,
        "base64": _base64(little.tobytes()),
    }


def _refusal(value: Any, keys: tuple[Any, ...]) -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        f"{name_of(keys)!r} is a {kind.__module__}.{kind.__qualname__}, and a checkpoint holds only tensors and plain "
        "values (None, bool, int, float, str, bytes, lists, tuples, dicts, sets, numbers of numpy): "
        "save what it consists of instead, or leave it out"
    )
