"""Decoding of the JSON of a checkpoint, which cannot name code to run; names of values."""

from __future__ import annotations

import base64
import re
from collections import Counter, OrderedDict
from typing import TYPE_CHECKING, Any

from dstrat.checkpoint.portable.format import DTYPES, dtype_named

if TYPE_CHECKING:
    from collections.abc import Callable, Container, Iterable


_DEVICE = re.compile(r"[a-z]{2,20}(:[0-9]{1,5})?")
# Numbers only, in little-endian or of one byte; never "O", whose bytes are pointers to objects.
_NUMPY_DTYPE = re.compile(r"[<|][biufc][0-9]{1,2}")
_HEX = re.compile(r"-?0x[0-9a-f]+")  # as of hex()
_FLOATS = ("nan", "inf", "-inf")


def decode(value: Any, tensor: Callable[[str], Any]) -> Any:
    """Decode the JSON of :func:`~dstrat.checkpoint.portable.encode.encode` to the nested value.

    Args:
        value: The parsed JSON document.
        tensor: Returns the tensor of a name.

    Raises:
        ValueError: A tag is unknown, or its content is not valid.
    """
    try:
        return _Decoder(tensor).decode(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except (KeyError, TypeError, AttributeError, OverflowError) as error:  # missing fields, values of other types
        raise ValueError(f"a marked value in it makes no sense ({error})") from error


class _Decoder:
    """Decoding of one document."""

    def __init__(self, tensor: Callable[[str], Any]) -> None:
        # All that a document can make: it cannot name a class or a function to call.
        self._kinds: dict[str, Callable[[dict[str, Any]], Any]] = {
            "tensor": lambda tagged: tensor(_text(tagged["name"])),
            "int": _int,
            "float": _float,
            "complex": self._complex,
            "bytes": lambda tagged: base64.b64decode(_text(tagged["base64"]), validate=True),
            "tuple": lambda tagged: tuple(self._items(tagged)),
            "set": lambda tagged: set(self._items(tagged)),
            "frozenset": lambda tagged: frozenset(self._items(tagged)),
            "dict": lambda tagged: dict(self._pairs(tagged)),
            "ordered": lambda tagged: OrderedDict(self._pairs(tagged)),
            "counter": lambda tagged: Counter(dict(self._pairs(tagged))),
            "dtype": lambda tagged: dtype_named(_known_dtype(tagged["name"])),
            "device": _device,
            "size": self._size,
            "numpy": lambda tagged: _array(tagged)[()],  # a number of numpy, not an array without dimensions
            "ndarray": _array,
        }

    def decode(self, value: Any) -> Any:
        if type(value) is list:
            return [self.decode(item) for item in value]
        if type(value) is not dict:
            return value
        if TAG not in value:
            return {key: self.decode(item) for key, item in value.items()}
        kind = value[TAG]
        if type(kind) is not str or kind not in self._kinds:
            raise ValueError(f"it holds a value of the kind {kind!r:.80}, which this dstrat does not know")
        return self._kinds[kind](value)

    def _items(self, tagged: dict[str, Any]) -> list[Any]:
        items = tagged["items"]
        if type(items) is not list:
            raise ValueError(f"the items of a {tagged[TAG]} are {items!r:.80} and no list")
        return [self.decode(item) for item in items]

    def _pairs(self, tagged: dict[str, Any]) -> list[tuple[Any, Any]]:
        pairs = [(key, item) for key, item in self._items(tagged)]
        if len({key for key, _ in pairs}) != len(pairs):  # also 1 and true, which JSON keeps apart and Python does not
            raise ValueError("a dict in it has a key twice")
        return pairs

    def _complex(self, tagged: dict[str, Any]) -> complex:
        real, imaginary = (self.decode(number) for number in tagged["parts"])
        return complex(real, imaginary)

    def _size(self, tagged: dict[str, Any]) -> Any:
        import torch  # here, since checkpoints are inspected without torch

        return torch.Size(self._items(tagged))


def _text(value: Any) -> str:
    if type(value) is not str:
        raise ValueError(f"expected text, got {value!r:.80}")
    return value


def _int(tagged: dict[str, Any]) -> int:
    digits = _text(tagged["hex"])
    if _HEX.fullmatch(digits) is None:  # int() takes spaces, underscores and digits of other scripts too
        raise ValueError(f"expected a hexadecimal number, got {digits[:80]!r}")
    return int(digits, 16)


def _float(tagged: dict[str, Any]) -> float:
    name = _text(tagged["name"])
    if name not in _FLOATS:
        raise ValueError(f"expected one of {', '.join(_FLOATS)}, got {name[:80]!r}")
    return float(name)


def _known_dtype(name: Any) -> str:
    # torch knows more dtypes than tensors of a checkpoint may have: an optimizer may name any of them.
    if _text(name) not in DTYPES and re.fullmatch(r"[a-z][a-z0-9_]{1,30}", name) is None:
        raise ValueError(f"{name!r:.80} is no dtype")
    return str(name)


def _device(tagged: dict[str, Any]) -> Any:
    import torch

    name = _text(tagged["name"])
    if _DEVICE.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is no device")
    try:
        return torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"{name!r} is no device: {error}") from error


def _array(tagged: dict[str, Any]) -> Any:
    import numpy as np

    name = _text(tagged["dtype"])
    if _NUMPY_DTYPE.fullmatch(name) is None:
        raise ValueError(f"{name[:80]!r} is no dtype of numbers")
    shape = tagged["shape"]
    if type(shape) is not list or not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"{shape!r:.80} is no shape")
    data = base64.b64decode(_text(tagged["base64"]), validate=True)
    return np.frombuffer(data, dtype=np.dtype(name)).reshape(shape).copy()  # bytes are read-only memory


# Tags of types that JSON lacks, and names of values


TAG = "$"
"""The key of an object that encodes a value of a type that JSON lacks; its value is the name of the type."""

SEPARATOR = "/"

_TAGGED_DICTS = ("dict", "ordered", "counter")


def name_of(keys: Iterable[object]) -> str:
    """Return the name of the value that some keys lead to, such as ``state_dict/layers.0.weight``."""
    # The escapes of JSON Pointer (RFC 6901).
    return SEPARATOR.join([str(key).replace("~", "~0").replace(SEPARATOR, "~1") for key in keys])


def join_name(path: str, key: object) -> str:
    """Return the name of a value below another one, from that one's name."""
    return f"{path}{SEPARATOR}{name_of([key])}" if path else name_of([key])


def split_name(path: str) -> list[str]:
    """Return the keys of a name."""
    return [key_text.replace("~1", SEPARATOR).replace("~0", "~") for key_text in path.split(SEPARATOR)]


def insert(tree: Any, keys: list[str], value: Any) -> None:
    """Set a value in nested dicts and lists, at the end of a path of keys.

    Raises:
        ValueError: The path leads through another value, or its end is occupied.
    """
    for key in keys[:-1]:
        if isinstance(tree, dict):
            tree = tree.setdefault(key, {})
        elif isinstance(tree, list) and key.isdecimal() and int(key) < len(tree):
            tree = tree[int(key)]  # such as the states of optimizers
    if not isinstance(tree, dict) or keys[-1] in tree:
        raise ValueError(f"tensor {SEPARATOR.join(keys)[:200]!r} has no place among the values")
    tree[keys[-1]] = value


def without_tensors(value: Any, *, keep: Container[str]) -> Any:
    """Return the content of a JSON document without tensors, except those whose names are in ``keep``."""
    if isinstance(value, list):
        return [without_tensors(item, keep=keep) for item in value if _stays(item, keep)]
    if not isinstance(value, dict):
        return value
    if value.get(TAG) in _TAGGED_DICTS and isinstance(value.get("items"), list):
        # Without its key too.  What is no pair stays, so that decode refuses it.
        pairs = [pair for pair in value["items"] if not (isinstance(pair, list) and pair) or _stays(pair[-1], keep)]
        return {**value, "items": [without_tensors(pair, keep=keep) for pair in pairs]}
    return {key: without_tensors(item, keep=keep) for key, item in value.items() if _stays(item, keep)}


def _stays(item: Any, keep: Container[str]) -> bool:
    if not isinstance(item, dict) or item.get(TAG) != "tensor":
        return True
    name = item.get("name")
    return not isinstance(name, str) or name in keep  # decode refuses a name that is no str
