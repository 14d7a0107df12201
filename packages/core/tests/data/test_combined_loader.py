"""Several loaders that are read as one."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch.utils.data import DataLoader

from dstrat import CombinedLoader
from dstrat.data.resume import Beginning, ResumedLoader
from dstrat.errors import MisuseError, RequestError


class Pair(NamedTuple):
    first: object
    second: object


class Endless:
    def __iter__(self):
        while True:
            yield "e"


class Counting:
    """A loader that tells how often it was started, and how many batches were asked of it."""

    def __init__(self, batches):
        self.batches = batches
        self.starts = 0

    def __iter__(self):
        self.starts += 1
        return iter(self.batches)

    def __len__(self):
        return len(self.batches)


def numbers(*batches):
    return DataLoader(list(batches), batch_size=None)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("min_size", [(0, 10), (1, 11)]),
        ("max_size", [(0, 10), (1, 11), (2, None), (3, None), (4, None)]),
        ("max_size_cycle", [(0, 10), (1, 11), (2, 10), (3, 11), (4, 10)]),
        ("sequential", [0, 1, 2, 3, 4, 10, 11]),
    ],
)
def test_the_mode_says_what_is_read_together(mode, expected):
    combined = CombinedLoader((numbers(0, 1, 2, 3, 4), numbers(10, 11)), mode)
    assert list(combined) == expected
    assert list(combined) == expected
    assert len(combined) == len(expected)


@pytest.mark.parametrize(
    ("given", "batch"),
    [
        ([numbers(1), numbers(2)], [1, 2]),
        ((numbers(1), numbers(2)), (1, 2)),
        ({"a": numbers(1), "b": numbers(2)}, {"a": 1, "b": 2}),
        (Pair(numbers(1), numbers(2)), Pair(1, 2)),
        ({"a": [numbers(1), (numbers(2),)], "b": {"c": numbers(3)}}, {"a": [1, (2,)], "b": {"c": 3}}),
    ],
    ids=["list", "tuple", "dict", "named tuple", "nested"],
)
def test_a_batch_has_the_structure_of_the_loaders(given, batch):
    [found] = CombinedLoader(given)
    assert found == batch
    assert type(found) is type(batch)


def test_a_shuffled_loader_is_shuffled_anew_when_it_is_read_again():
    torch.manual_seed(0)
    shuffled = DataLoader(list(range(50)), batch_size=50, shuffle=True)
    batches = [short.tolist() for short, _ in CombinedLoader([shuffled, numbers(1, 2)], "max_size_cycle")]
    assert sorted(batches[0]) == sorted(batches[1]) == list(range(50))
    assert batches[0] != batches[1]


@pytest.mark.parametrize("batches_read", range(2, 7))
@pytest.mark.parametrize("batches_ahead", [0, 1])
def test_the_order_of_a_restart_is_kept_for_a_resume(batches_read, batches_ahead):
    short = DataLoader(list(range(6)), batch_size=3, shuffle=True)
    loader = CombinedLoader([short, numbers(*range(8))], "max_size_cycle")
    torch.manual_seed(1)
    beginning, iterator, batches = Beginning.of(loader), iter(loader), []
    for _ in range(batches_read + batches_ahead):
        batches.append(next(iterator))
        torch.rand(3)  # of the training
    saved, now = beginning.state_dict(), torch.get_rng_state()
    batches.extend(iterator)

    torch.set_rng_state(now)
    loader.restarts = {}
    resumed = list(ResumedLoader(loader, Beginning.from_state_dict(saved), batches_read))
    assert [one.tolist() for one, _ in resumed] == [one.tolist() for one, _ in batches[batches_read:]]


def test_no_loader_is_started_again_once_all_have_ended():
    loaders = [Counting([1, 2]), Counting([1])]
    assert len(list(CombinedLoader(loaders, "max_size_cycle"))) == 2
    assert [loader.starts for loader in loaders] == [1, 2]


def test_the_shortest_ends_an_endless_one():
    assert list(CombinedLoader([Endless(), numbers(1, 2)], "min_size")) == [["e", 1], ["e", 2]]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_without_the_length_of_each_there_is_none(mode):
    with pytest.raises(TypeError, match="Endless"):
        len(CombinedLoader([numbers(1), Endless()], mode))


@pytest.mark.parametrize("make", [numbers, lambda: iter([1])], ids=["empty", "an iterator"])
def test_a_loader_that_cannot_be_read_again_is_an_error(make):
    with pytest.raises(MisuseError, match="in a CombinedLoader has no batch when it is read again"):
        list(CombinedLoader([numbers(1, 2, 3), make()], "max_size_cycle"))


def test_an_unknown_mode_is_an_error_that_lists_the_known_ones():
    with pytest.raises(RequestError, match="mode='max' of CombinedLoader must be one of 'min_size', 'max_size_cycle'"):
        CombinedLoader([numbers(1)], "max")


@pytest.mark.parametrize("given", [[], {}, {"a": []}, numbers(1)], ids=["list", "dict", "nested", "a loader"])
def test_combining_nothing_is_an_error(given):
    with pytest.raises(MisuseError, match="combines no loaders: give it a list, tuple or dict of them"):
        CombinedLoader(given)
