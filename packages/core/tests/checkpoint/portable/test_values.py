"""Nested values as JSON and back."""

import json
import math
import random
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import Enum
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dstrat.checkpoint.portable.decode import decode
from dstrat.checkpoint.portable.encode import encode
from dstrat.checkpoint.portable.format import dump_json, parse_json
from dstrat.errors import CheckpointError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.complex_numbers(allow_nan=False)
    | st.text(st.characters())
    | st.binary(max_size=20)
)
KEYS = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.tuples(st.integers(), st.text(max_size=3))
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text(max_size=5) | st.just("$"), inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=4).map(OrderedDict)
        | st.frozensets(SCALARS, max_size=4)
        | st.sets(SCALARS, max_size=4)
    ),
    max_leaves=20,
)


class Colour(Enum):
    RED = 1


def there_and_back(value):
    encoded = encode(value)
    return decode(parse_json(dump_json(encoded.value)), encoded.tensors.__getitem__)


def spelled(value):
    """The value with the types of everything in it, so that 1, 1.0 and True differ."""
    if isinstance(value, dict):
        return type(value), [(spelled(key), spelled(item)) for key, item in value.items()]
    if isinstance(value, (set, frozenset)):
        return type(value), sorted(map(repr, map(spelled, value)))
    if isinstance(value, (list, tuple)):
        return type(value), [spelled(item) for item in value]
    return type(value), repr(value)


@given(VALUES)
def test_plain_values_come_back_exactly(value):
    assert spelled(there_and_back(value)) == spelled(value)


@pytest.mark.parametrize(
    "value",
    [
        Counter({3: 2, 1: 1}),
        {"$": "tensor", "name": "mine"},
        [-0.0, 5e-324, 0.1, 1e308, math.inf, -math.inf],
        torch.float8_e4m3fn,
        torch.quint8,
        torch.device("cuda:3"),
        torch.device("cpu"),
        torch.Size([2, 3]),
        np.float64(0.1),
        np.int8(-3),
        np.bool_(True),
        np.complex64(1 + 2j),
        "\ud800 lone",
        10**4000,
        random.getstate(),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_json_lacks_come_back_exactly(value):
    assert spelled(there_and_back(value)) == spelled(value)


def test_nan_comes_back():
    assert math.isnan(there_and_back(math.nan))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(6, dtype=np.uint32).reshape(2, 3),
        np.array(3.5),
        np.zeros((0, 4)),
        np.arange(8, dtype=">i4")[::2],
        np.array([True, False]),
    ],
    ids=["matrix", "scalar", "empty", "big endian", "bool"],
)
def test_arrays_come_back(array):
    back = there_and_back(array)
    assert back.dtype == array.dtype.newbyteorder("<")
    assert back.shape == array.shape
    assert back.tolist() == array.tolist()
    assert back.flags.writeable


def test_tensors_are_set_aside_under_the_name_of_their_place():
    encoded = encode({"state_dict": {"a.b": torch.ones(1), "x/y~": torch.ones(2)}, "l": [{0: torch.ones(3)}]})
    assert list(encoded.tensors) == ["state_dict/a.b", "state_dict/x~1y~0", "l/0/0"]
    assert "ones" not in json.dumps(encoded.value)


@pytest.mark.parametrize(
    "value",
    [
        object(),
        Path("a"),
        Colour.RED,
        namedtuple("Point", "x")(1),  # noqa: PYI024 - the plain one is tested
        defaultdict(list),
        lambda: 0,
        np.array([None]),
        np.array(["text"]),
        bytearray(b"x"),
        range(3),
        type("Text", (str,), {})("x"),
        np.datetime64("2020-01-01"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_with_its_place(value):
    with pytest.raises(CheckpointError, match=r"'callbacks/Early/1' is a .*, and a checkpoint holds only"):
        encode({"callbacks": {"Early": [0, value]}})


def test_something_that_holds_itself_is_refused():
    endless = {}
    endless["me"] = endless
    with pytest.raises(CheckpointError, match=r"'me/me/me/.* is nested more than 100 levels deep, or holds itself"):
        encode(endless)


def test_tensors_whose_names_would_be_the_same_are_refused():
    with pytest.raises(CheckpointError, match="two tensors of the checkpoint are called 's/0'"):
        encode({"s": {0: torch.ones(1), "0": torch.ones(1)}})


def test_a_document_outside_ascii_is_refused():
    with pytest.raises(ValueError, match="it is not JSON in ASCII"):
        parse_json('{"rate": 1, "é": 2}'.encode())


@pytest.mark.parametrize(
    "document",
    [
        {"$": "os.system"},
        {"$": ["tensor"]},
        {"$": "tensor"},
        {"$": "tuple", "items": "ab"},
        {"$": "tuple", "items": {"a": 1}},
        {"$": "dict", "items": [[[], 1]]},
        {"$": "dict", "items": [[1, 2, 3]]},
        {"$": "dict", "items": [[1, 1], [1, 2]]},
        {"$": "int", "hex": "zz"},
        {"$": "int", "hex": "0x1_0"},
        {"$": "int", "hex": "10"},
        {"$": "int", "hex": " 0x10"},
        {"$": "int", "hex": "0x\u0661"},
        {"$": "float", "name": "1e5"},
        {"$": "bytes", "base64": "!"},
        {"$": "dtype", "name": "os.system"},
        {"$": "dtype", "name": "nn"},
        {"$": "device", "name": "cuda:99999999999999"},
        {"$": "device", "name": "nonsense"},
        {"$": "size", "items": ["a"]},
        {"$": "ndarray", "dtype": "|O8", "shape": [1], "base64": "AAAAAAAAAAA="},
        {"$": "ndarray", "dtype": "<f4", "shape": [10**15], "base64": "AAAA"},
        {"$": "ndarray", "dtype": "<f4", "shape": [-1], "base64": "AAAA"},
        {"$": "set", "items": [[1]]},
        {"$": "complex", "parts": ["a", "b"]},
        {"$": "complex", "parts": []},
        {"$": "counter", "items": [["a", {"$": "pickle", "data": ""}]]},
    ],
    ids=json.dumps,
)
def test_marks_that_make_no_sense_are_refused(document):
    with pytest.raises(ValueError):
        decode(document, {}.__getitem__)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1, "a": 2}', "the key 'a' twice"),
        (b'{"a": NaN}', "holds NaN"),
        (b"[1e999999]", "1e999999, which is too large"),
        (b"-1e400", "-1e400, which is too large"),
        (b"[" * 100_000 + b"]" * 100_000, "nested too deeply"),
        (b'{"a": ' * 100_000, "nested too deeply"),
        (b"\x80\x04K\x01.", "not JSON in ASCII"),
        (b"9" * 100_000, "digits"),
        (b"", "Expecting value"),
    ],
    ids=["twice", "constant", "infinite", "negative infinite", "deep list", "deep object", "pickle", "digits", "empty"],
)
def test_documents_that_are_not_strictly_json_are_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_json(text)
