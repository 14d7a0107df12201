"""Batches of all shapes; the meta device stands for another device, which every machine has."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict, UserDict, defaultdict
from types import MappingProxyType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.nn.utils.rnn import pack_sequence

from dstrat.errors import DstratError, MisuseError
from dstrat.interfaces.batch import (
    apply_to_tensors,
    move_to_device,
    mover_to,
    numbers_to_tensors,
    pin_memory,
    tensors_in,
    tensors_in_objects,
)

CPU, META = torch.device("cpu"), torch.device("meta")


class Pair(NamedTuple):
    x: object
    y: object


class Edge(NamedTuple):
    start: torch.Tensor
    to: torch.Tensor


@dataclasses.dataclass
class Mutable:
    x: torch.Tensor
    name: str = "a"
    doubled: torch.Tensor | None = dataclasses.field(init=False, default=None)

    def __post_init__(self):
        self.doubled = self.x * 2


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    scale: dataclasses.InitVar[float]


@dataclasses.dataclass(frozen=True, slots=True)
class Slotted:
    x: torch.Tensor
    name: str


class Encoding(UserDict):
    """A mapping with a constructor of its own and further attributes, like those of tokenizers."""

    def __init__(self, data, *, length):
        super().__init__(data)
        self.length = length


class Rows(UserDict):
    """Iterates over its rows and not its names, as the TensorDict of tensordict does."""

    def __iter__(self):
        return zip(*self.data.values(), strict=True)

    def keys(self):
        return self.data.keys()

    def values(self):
        return self.data.values()


class Tagged(list):
    tag = None


class Graph:
    """Moves itself, as graphs and nested tensors do."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        return Graph(self.x.to(device))


class MovedInPlace:
    """Returns nothing from its to(), as many graphs of other packages."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        self.x = self.x.to(device)


class Sealed:
    def __init__(self, x):
        self.x = x


class Moment:
    def to(self, timezone):
        raise ValueError(f"{timezone!r} is not a timezone")


def tensor():
    return torch.ones(2)


def devices(batch):
    found = []
    apply_to_tensors(batch, lambda tensor: found.append(tensor.device.type))
    return found


@pytest.mark.parametrize(
    "batch",
    [
        tensor(),
        [tensor(), tensor()],
        (tensor(), "text", 3, None),
        {"x": tensor(), "more": {"y": (tensor(), [tensor()])}},
        OrderedDict(x=tensor()),
        defaultdict(list, x=tensor()),
        MappingProxyType({"x": tensor()}),
        UserDict(x=tensor()),
        Encoding({"x": tensor()}, length=4),
        Pair(tensor(), {"y": tensor()}),
        Edge(tensor(), tensor()),
        torch.ones(2, 2).max(0),
        Mutable(tensor()),
        Frozen(tensor(), 1.0),
        Slotted(tensor(), "b"),
    ],
    ids=lambda batch: type(batch).__name__,
)
def test_every_tensor_is_moved_and_types_stay(batch):
    assert move_to_device(batch, CPU) is batch
    moved = move_to_device(batch, META)
    assert type(moved) is type(batch)
    assert moved is not batch
    assert set(devices(batch)) == {"cpu"}
    assert set(devices(moved)) == {"meta"}


def test_what_a_collection_knows_besides_is_kept():
    encoding = move_to_device(Encoding({"x": tensor(), "n": 1}, length=4), META)
    assert (encoding.length, encoding["n"]) == (4, 1)
    tagged = Tagged([tensor()])
    tagged.tag = "train"
    assert move_to_device(tagged, META).tag == "train"
    assert move_to_device(defaultdict(list, x=tensor()), META)["new"] == []
    assert move_to_device(Slotted(tensor(), "b"), META).name == "b"
    mutable = Mutable(tensor())
    mutable.tag = "train"
    assert move_to_device(mutable, META).tag == "train"


def test_fields_that_init_does_not_take_are_moved_too():
    moved = move_to_device(Mutable(tensor()), META)
    assert (moved.x.device, moved.doubled.device) == (META, META)


def test_a_packed_sequence_moves_itself_and_keeps_its_lengths_on_the_cpu():
    moved = move_to_device(pack_sequence([tensor()]), META)
    assert (moved.data.device, moved.batch_sizes.device) == (META, CPU)


@pytest.mark.parametrize("batch", [[tensor(), tensor()], (tensor(),), {"x": tensor()}, tensor(), []])
def test_a_mover_does_what_moving_does(batch):
    assert mover_to(CPU)(batch) is batch
    assert set(devices(mover_to(META)(batch))) <= {"meta"}


def test_a_mover_to_the_cpu_sees_what_is_elsewhere():
    with pytest.raises(NotImplementedError, match="meta tensor"):  # which has no data to be copied
        mover_to(CPU)([tensor(), tensor().to(META)])


def test_objects_move_themselves_also_inside_a_batch():
    assert move_to_device({"graph": [Graph(tensor())]}, META)["graph"][0].x.device == META


def test_an_object_that_moves_in_place_stays_in_the_batch():
    moved = move_to_device((MovedInPlace(tensor()), None), META)
    assert moved[0].x.device == META


@pytest.mark.parametrize("batch", ["text", 3, None, b"", [], {}, object(), [object(), int], torch.float32, {1, 2}])
def test_what_holds_no_tensor_is_left_alone(batch):
    assert move_to_device(batch, META) is batch


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: [{"a": x}]], ids=["alone", "nested"])
def test_an_object_whose_tensors_cannot_be_moved_is_an_error_that_says_what_to_do(wrap):
    with pytest.raises(MisuseError, match=r"Sealed, which holds tensors \(x\).*override transfer_batch_to_device"):
        move_to_device(wrap(Sealed(tensor())), META)
    assert isinstance(move_to_device(Sealed(tensor()), CPU), Sealed)


def test_a_method_that_moves_something_else_is_an_error_that_says_what_to_do():
    with pytest.raises(DstratError, match=r"Moment, which cannot be moved by its method to\('meta'\).*not a timezone"):
        move_to_device([Moment()], META)


def test_a_mapping_that_cannot_be_rebuilt_is_an_error_that_says_what_to_do():
    from collections.abc import Mapping

    class Fixed(Mapping):
        def __init__(self, one, two):
            self._values = {"one": one, "two": two}

        def __getitem__(self, key):
            return self._values[key]

        def __iter__(self):
            return iter(self._values)

        def __len__(self):
            return 2

    with pytest.raises(MisuseError, match="Fixed, which cannot be made from a dict"):
        move_to_device(Fixed(tensor(), 2), META)
    assert move_to_device(Fixed(1, 2), META)["two"] == 2


def test_a_mapping_that_iterates_over_rows_is_rebuilt_by_its_keys():
    rows = Rows({"x": torch.ones(3), "y": torch.zeros(3)})
    changed = apply_to_tensors(rows, lambda tensor: tensor + 1)
    assert type(changed) is Rows
    assert [float(changed[name].sum()) for name in ("x", "y")] == [6, 3]
    assert float(rows["x"].sum()) == 3


def test_a_function_is_applied_to_tensors_alone():
    halved = apply_to_tensors({"x": tensor(), "n": 3, "graph": Moment()}, lambda tensor: tensor.half())
    assert halved["x"].dtype == torch.float16
    assert halved["n"] == 3


@pytest.mark.cuda
def test_a_batch_from_pinned_memory_is_moved_to_the_gpu():
    device = torch.device("cuda", 0)
    moved = move_to_device([tensor().pin_memory(), tensor(), Graph(tensor())], device)
    assert moved[0].device == moved[1].device == moved[2].x.device == device
    assert moved[0].tolist() == [1.0, 1.0]


def test_numbers_become_tensors_and_the_rest_stays():
    given = {"n": 3, "x": [2.5, True], "array": np.arange(2), "text": ("a", None), "t": tensor()}
    made = numbers_to_tensors(given, torch.device("cpu"))
    assert (made["n"].dtype, made["n"].item()) == (torch.int64, 3)
    assert [(value.dtype, value.item()) for value in made["x"]] == [(torch.float32, 2.5), (torch.bool, True)]
    assert made["array"].tolist() == [0, 1]
    assert made["text"] == ("a", None)
    assert made["t"] is given["t"]


class Pinnable(torch.Tensor):
    """A tensor that is pinned on a machine without a device to pin it for."""

    def pin_memory(self):
        return self + 100


class Movable(Encoding):
    """The batch of a tokenizer, which moves itself."""

    def to(self, device):
        raise AssertionError("it is moved later")


class PinsItself:
    """An object that moves and pins itself."""

    def __init__(self, x):
        self.x = x

    def to(self, device):
        raise AssertionError("it is moved later")

    def pin_memory(self):
        return PinsItself(self.x.pin_memory())


def test_objects_that_move_themselves_are_pinned_too():
    x = torch.ones(2).as_subclass(Pinnable)
    encoding, (graph, other) = pin_memory((Movable({"ids": x, "nested": [x]}, length=3), [PinsItself(x), "text"]))
    assert (type(encoding), encoding.length, other) == (Movable, 3, "text")
    assert [tensor.tolist() for tensor in (encoding["ids"], encoding["nested"][0], graph.x)] == [[101.0, 101.0]] * 3


def test_the_tensors_of_a_batch_are_listed_in_order():
    first, second = torch.ones(1), torch.ones(2)
    assert tensors_in({"a": [first, "text"], "b": (second, 3, first)}) == [first, second, first]


def test_tensors_in_long_chains_of_objects() -> None:
    tensors = [torch.zeros(1) for _ in range(2000)]
    last = None
    for tensor in tensors:
        last = SimpleNamespace(value=tensor, before=[last], library=torch, log=logging.getLogger())
    noted = tensors_in_objects({"last": last, "plain": torch.ones(1)})
    assert {id(tensor) for tensor in noted} == {id(tensor) for tensor in tensors}
