"""Values that the JSON of a checkpoint stands for; nothing in it can name code to run."""

from __future__ import annotations

import base64
import re
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.portable.format import DTYPES, dtype_named

if TYPE_CHECKING:
    from collections.abc import Callable, Container


_DEVICE = re.compile(r"[a-z]{2,20}(:[0-9]{1,5})?")
_NUMPY_DTYPE = re.compile(r"[<|][biufc][0-9]{1,2}")
_FLOATS = ("nan", "inf", "-inf")


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Return the nested value that :func:`~dstrat.checkpoint.portable.encode.encode` was given.

    Args:
        value: What a JSON document held.
        tensor: Returns the tensor of a name.

    Raises:
        ValueError: It holds a mark that is not known, or one with a content that makes no sense.
    """
    try:
        return _Decoder(tensor).decode(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ValueError(f"a marked value in it makes no sense ({error})") from error


class _Decoder:
    """Walks through a value once."""

    def __init__(self, tensor: Callable[[str], Any]) -> None:
        self._kinds: dict[str, Callable[[dict[str, Any]], Any]] = {
            "tensor": lambda mark: tensor(_text(mark["name"])),
            "int": lambda mark: int(_text(mark["hex"]), 16),
            "float": _float,
            "complex": self._complex,
            "bytes": lambda mark: base64.b64decode(_text(mark["base64"]), validate=True),
            "tuple": lambda mark: tuple(self._items(mark)),
            "set": lambda mark: set(self._items(mark)),
            "frozenset": lambda mark: frozenset(self._items(mark)),
            "dict": lambda mark: dict(self._pairs(mark)),
            "ordered": lambda mark: OrderedDict(self._pairs(mark)),
            "counter": lambda mark: Counter(dict(self._pairs(mark))),
            "dtype": lambda mark: dtype_named(_known_dtype(mark["name"])),
            "device": _device,
            "size": self._size,
            "numpy": lambda mark: _array(mark)[()],
            "ndarray": _array,
        }

    def decode(self, value: Any) -> Any:
        if type(value) is list:
            return [self.decode(item) for item in value]
        if type(value) is not dict:
            return value
        if MARK not in value:
            return {key: self.decode(item) for key, item in value.items()}
        kind = value[MARK]
        if type(kind) is not str or kind not in self._kinds:
            raise ValueError(f"it holds a value of the kind {kind!r:.80}, which this dstrat does not know")
        return self._kinds[kind](value)

    def _items(self, mark: dict[str, Any]) -> list[Any]:
        items = mark["items"]
        if type(items) is not list:
            raise ValueError(f"the items of a {mark[MARK]} are {items!r:.80} and no list")
        return [self.decode(item) for item in items]

    def _pairs(self, mark: dict[str, Any]) -> list[tuple[Any, Any]]:
        pairs = [(key, item) for key, item in self._items(mark)]
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a dict in it has a key twice")
        return pairs

    def _complex(self, mark: dict[str, Any]) -> complex:
        real, imaginary = (self.decode(part) for part in mark["parts"])
        return complex(real, imaginary)

    def _size(self, mark: dict[str, Any]) -> Any:
        import torch

        return torch.Size(self._items(mark))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"{value!r:.80} is no text")
    return value


def _float(mark: dict[str, Any]) -> float:
    name = _text(mark["name"])
    if name not in _FLOATS:
        raise ValueError(f"{name[:80]!r} is none of {', '.join(_FLOATS)}")
    return float(name)


def _known_dtype(name: Any) -> str:
    # torch knows more dtypes than tensors of a checkpoint may have: an optimizer may name any of them.
    if _text(name) not in DTYPES and re.fullmatch(r"[a-z][a-z0-9_]{1,30}", name) is None:
        raise ValueError(f"{name!r:.80} is no dtype")
    return str(name)


def _device(mark: dict[str, Any]) -> Any:
    import torch

    name = _text(mark["name"])
    if _DEVICE.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is no device")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device: {error}") from error


def _array(mark: dict[str, Any]) -> Any:
    import numpy as np

    name = _text(mark["dtype"])
    if _NUMPY_DTYPE.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is no dtype of numbers")
    shape = mark["shape"]
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r:.80} is no shape")
    data = base64.b64decode(_text(mark["base64"]), validate=True)
    return np.frombuffer(data, dtype=np.dtype(name)).reshape(shape).copy()


# Names in the JSON of a checkpoint: how a value that JSON lacks is marked, and what a place in it is called.


MARK = "$"
"""The key of an object that stands for a value that JSON lacks; its value says of which kind."""

SEPARATOR = "/"

_MARKED_DICTS = ("dict", "ordered", "counter")


def joined(path: str, key: object) -> str:
    """Return the name of a place below another, such as ``state_dict/layers.0.weight``."""
    part = str(key).replace("~", "~0").replace(SEPARATOR, "~1")
    return f"{path}{SEPARATOR}{part}" if path else part


def split(path: str) -> list[str]:
    """Return the keys that lead to a place."""
    return [part.replace("~1", SEPARATOR).replace("~0", "~") for part in path.split(SEPARATOR)]


def insert(tree: Any, keys: list[str], value: Any) -> None:
    """Put a value into nested dicts, at a place that a name led to.

    Raises:
        ValueError: There is something else on the way.
    """
    for key in keys[:-1]:
        if isinstance(tree, dict):
            tree = tree.setdefault(key, {})
    if not isinstance(tree, dict) or keys[-1] in tree:
        raise ValueError(f"tensor {SEPARATOR.join(keys)[:200]!r} has no place among the values")
    tree[keys[-1]] = value


def without_tensors(value: Any, *, keep: Container[str]) -> Any:
    """Return the content of a JSON document without the tensors whose names are not to be kept."""
    if isinstance(value, list):
        return [without_tensors(item, keep=keep) for item in value if _stays(item, keep)]
    if not isinstance(value, dict):
        return value
    if value.get(MARK) in _MARKED_DICTS and isinstance(value.get("items"), list):
        pairs = [pair for pair in value["items"] if not isinstance(pair, list) or _stays(pair[-1], keep)]
        return {**value, "items": [without_tensors(pair, keep=keep) for pair in pairs]}
    return {key: without_tensors(item, keep=keep) for key, item in value.items() if _stays(item, keep)}


def _stays(item: Any, keep: Container[str]) -> bool:
    return not (isinstance(item, dict) and item.get(MARK) == "tensor" and item.get("name") not in keep)
