from __future__ import annotations

import dataclasses
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch

from dstrat.errors import MisuseError
from dstrat.training.metrics.logged import size_of

Pair = namedtuple("Pair", ["x", "y"])  # noqa: PYI024 - the plain kind too


@dataclasses.dataclass
class Batch:
    name: str
    x: Any


@pytest.mark.parametrize(
    ("batch", "size"),
    [
        (torch.zeros(3, 2), 3),
        (torch.tensor(1.0), 1),
        ([torch.zeros(4), torch.zeros(5)], 4),
        ({"text": ["a", "b"], "x": {"deep": torch.zeros(6)}}, 6),
        (Pair("id", torch.zeros(7)), 7),
        (Batch("first", (torch.zeros(8),)), 8),
        (np.zeros((9, 2)), 9),
        (2.5, 1),
        ([1, [2, 3]], 1),
        ({"is_train": True, "lengths": [3, np.float32(4.0)], "x": torch.zeros(5, 2)}, 5),
        (["a", "b"], None),
        ({}, None),
        (object(), None),
    ],
)
def test_the_size_is_that_of_the_first_tensor_however_deep(batch, size):
    assert size_of(batch) == size


def test_a_mean_over_batches_whose_size_is_unknown_is_an_error_unless_it_is_given(quiet_trainer, make_line):
    options = {}

    class Texts(type(make_line())):
        def test_step(self, batch, batch_idx):
            self.log("length", len(batch[0]), **options)

    texts = [["a"], ["abc"]]
    module = make_line(Texts)
    message = (
        r"log\('length'\): the batch \(a list\) has no tensor with its size.*: pass it, log\(\.\.\., batch_size=n\)"
    )
    with pytest.raises(MisuseError, match=message):
        quiet_trainer().test(module, Loader(texts))
    options = {"batch_size": 1}
    assert quiet_trainer().test(module, Loader(texts)) == [{"length": 2.0}]
    options = {"reduce_fx": "max"}
    assert quiet_trainer().test(module, Loader(texts)) == [{"length": 3.0}]


@pytest.mark.parametrize("kind", [int, float, torch.tensor, lambda size: torch.tensor([size]), "int64"])
def test_the_size_is_a_number_of_any_kind(quiet_trainer, make_line, loader, kind):
    kind = getattr(pytest.importorskip("numpy"), kind) if isinstance(kind, str) else kind

    class Weighing(type(make_line())):
        def test_step(self, batch, batch_idx):
            self.log("x", float(batch_idx), batch_size=kind(3 if batch_idx else 1))

    assert quiet_trainer().test(make_line(Weighing), loader(24)) == [{"x": 0.75}]


@pytest.mark.parametrize("wrong", [torch.ones(2), "3"])
def test_anything_else_is_no_size(quiet_trainer, make_line, loader, wrong):
    class Wrong(type(make_line())):
        def test_step(self, batch, batch_idx):
            self.log("x", 1.0, batch_size=wrong)

    with pytest.raises(
        MisuseError, match=rf"log\('x', batch_size=\.\.\.\) got a {type(wrong).__name__}; give a number"
    ):
        quiet_trainer().test(make_line(Wrong), loader())


class Loader:
    """An iterable of batches that nobody collates."""

    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)
