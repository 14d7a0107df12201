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

from dstrat.checkpoint.portable.decode import TAG, join_name
from dstrat.checkpoint.portable.format import DEEPEST_NESTING, dtype_name, dump_json
from dstrat.errors import CheckpointError
from dstrat.interfaces.checkpoint_io import FlatShard

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

_ONLY_STRINGS = frozenset({str})
_PLAIN = (type(None), bool, str)
_SAFE_INTEGER = 2**63
_NUMBERS = "biufc"


@dataclass(frozen=True, kw_only=True, slots=True)
class Encoded:
    """A nested value, separated into JSON and tensors.

    Attributes:
        value: The value as JSON, with a tagged name in place of each tensor.
        tensors: The tensors, by name.
    """

    value: Any
    tensors: dict[str, Any]


def encode(value: Any, *, path: str = "") -> Encoded:
    """Encode a nested value as JSON and tensors.

    Args:
        value: Of None, bool, int, float, str, bytes, complex, list, tuple, dict, OrderedDict, Counter, set, frozenset,
            numpy's numbers and arrays of them, torch's dtypes, devices, sizes and tensors.
        path: The name of the value in the checkpoint, such as ``"state_dict"``; names of tensors begin with it.

    Raises:
        CheckpointError: A value is of another type; the message has its name.
    """
    encoder = _Encoder()
    encoded = encoder.encode(value, path, 0)
    return Encoded(value=encoded, tensors=encoder.tensors)


class _Encoder:
    """Encoding of one value, which collects its tensors."""

    def __init__(self) -> None:
        self.tensors: dict[str, Any] = {}
        self._by_type: dict[type, Callable[[Any, str, int], Any]] = {
            int: self._int,
            float: self._float,
            list: self._list,
            tuple: lambda value, path, depth: _tagged("tuple", items=self._list(value, path, depth)),
            torch.Size: lambda value, path, depth: _tagged("size", items=self._list(value, path, depth)),
            dict: self._dict,
            OrderedDict: lambda value, path, depth: _tagged("ordered", items=self._pairs(value, path, depth)),
            Counter: lambda value, path, depth: _tagged("counter", items=self._pairs(value, path, depth)),
            set: lambda value, path, depth: _tagged("set", items=self._set(value, path, depth)),
            frozenset: lambda value, path, depth: _tagged("frozenset", items=self._set(value, path, depth)),
            bytes: lambda value, path, depth: _tagged("bytes", base64=_base64(value)),  # noqa: ARG005 - as the others
            complex: lambda value, path, depth: _tagged(
                "complex", parts=[self._float(number, path, depth) for number in (value.real, value.imag)]
            ),
            torch.dtype: lambda value, path, depth: _tagged("dtype", name=dtype_name(value)),  # noqa: ARG005 - likewise
            torch.device: lambda value, path, depth: _tagged("device", name=str(value)),  # noqa: ARG005 - likewise
        }

    def encode(self, value: Any, path: str, depth: int) -> Any:
        if type(value) in _PLAIN:
            return value
        if depth > DEEPEST_NESTING:
            raise CheckpointError(f"{path[:200]!r} is nested more than {DEEPEST_NESTING} levels deep, or holds itself")
        if isinstance(value, (Tensor, FlatShard)):
            return self._tensor(value, path)
        if isinstance(value, (np.generic, np.ndarray)):
            return _numpy(value, path)
        encode = self._by_type.get(type(value))  # the exact type: a subclass would come back as its base class
        if encode is None:
            raise _refusal(value, path)
        return encode(value, path, depth)

    def _int(self, value: int, path: str, depth: int) -> Any:  # noqa: ARG002 - as the others
        # As hex, since Python refuses to parse decimal numbers of more than 4300 digits.
        return value if -_SAFE_INTEGER <= value < _SAFE_INTEGER else _tagged("int", hex=hex(value))

    def _float(self, value: float, path: str, depth: int) -> Any:  # noqa: ARG002 - as the others
        return value if math.isfinite(value) else _tagged("float", name=repr(value))

    def _list(self, value: Iterable[Any], path: str, depth: int) -> list[Any]:
        return [
            item if type(item) in _PLAIN else self.encode(item, join_name(path, position), depth + 1)
            for position, item in enumerate(value)
        ]

    def _set(self, value: Iterable[Any], path: str, depth: int) -> list[Any]:
        # Sorted, as the order of a set of str differs between processes.
        return sorted((self.encode(item, path, depth + 1) for item in value), key=dump_json)

    def _dict(self, value: dict[Any, Any], path: str, depth: int) -> Any:
        if set(map(type, value)) <= _ONLY_STRINGS and TAG not in value:
            return {
                key: item if type(item) in _PLAIN else self.encode(item, join_name(path, key), depth + 1)
                for key, item in value.items()
            }
        return _tagged("dict", items=self._pairs(value, path, depth))

    def _pairs(self, value: dict[Any, Any], path: str, depth: int) -> list[Any]:
        return [
            [self.encode(key, f"{path} (a key)", depth + 1), self.encode(item, join_name(path, key), depth + 1)]
            for key, item in value.items()
        ]

    def _tensor(self, tensor: Tensor | FlatShard, path: str) -> Any:
        if path in self.tensors:  # the keys 1 and "1" of a dict have one name
            raise CheckpointError(f"two tensors of the checkpoint are called {path!r}: give one of them another key")
        self.tensors[path] = tensor
        return _tagged("tensor", name=path)


def _tagged(kind: str, **content: Any) -> dict[str, Any]:
    return {TAG: kind, **content}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _numpy(value: Any, path: str) -> Any:
    array = np.asarray(value)
    # "g" and "G" are long doubles, whose size depends on the platform.
    if array.dtype.kind not in _NUMBERS or array.dtype.itemsize > 16 or array.dtype.char in "gG":
        raise _refusal(value, path)
    little = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))
    kind = "ndarray" if isinstance(value, np.ndarray) else "numpy"
    shape = list(array.shape)
    return _tagged(kind, dtype=little.dtype.str, shape=shape, base64=_base64(little.tobytes()))


def _refusal(value: Any, path: str) -> CheckpointError:
    kind = type(value)
    return CheckpointError(
        f"{path!r} is a {kind.__module__}.{kind.__qualname__}, and a checkpoint holds only tensors and plain values "
        "(None, bool, int, float, str, bytes, lists, tuples, dicts, sets, numbers of numpy): "
        "save what it consists of instead, or leave it out"
    )
