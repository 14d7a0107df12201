"""What ranks tell each other before they save."""

from __future__ import annotations

import itertools
import random
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from dstrat.checkpoint.portable.format import dump_json, parse_json
from dstrat.checkpoint.portable.ranks import Ranks
from dstrat.checkpoint.portable.write_plan import make_write_plan, tensor_layouts
from dstrat.errors import CheckpointError

SIZE = 3


class Threads(Ranks):
    """Ranks that are threads of this process, and count the bytes that they tell."""

    def __init__(self, rank, messages, barrier):
        self.rank, self.size = rank, SIZE
        self.told = 0
        self._messages, self._barrier = messages, barrier

    def exchange(self, message):
        self._messages[self.rank] = message
        self._barrier.wait(300)
        heard = list(self._messages)
        self._barrier.wait(300)
        self.told += len(message)
        return heard

    def broadcast(self, message):
        return self.exchange(message)[0]


def planned(tensors):
    """Return the plans of ranks that have these tensors, and how much each has told."""
    messages, barrier = [b""] * SIZE, threading.Barrier(SIZE)
    everyone = [Threads(rank, messages, barrier) for rank in range(SIZE)]
    with ThreadPoolExecutor(SIZE) as threads:
        plans = list(threads.map(make_write_plan, map(tensor_layouts, tensors), [{}] * SIZE, everyone))
    return [[payload.name for payload in found.payloads] for found in plans], [ranks.told for ranks in everyone]


def weights(count=500):
    return {f"state_dict.layers.{number}.weight": torch.zeros(4) for number in range(count)}


def test_each_tensor_is_written_once_by_a_rank_that_has_it():
    shared, buffers, stage = weights(20), {"state_dict.mean": torch.zeros(3)}, {"state_dict.stage": torch.zeros(9)}
    names, _ = planned([{**shared, **buffers}, shared, {**shared, **stage}])
    assert sorted(itertools.chain(*names)) == sorted({**shared, **buffers, **stage})
    assert "state_dict.mean" in names[0]
    assert "state_dict.stage" in names[2]


def test_ranks_that_have_the_same_tell_little_and_others_how_they_differ():
    shared = weights()
    _, same = planned([shared] * SIZE)
    _, different = planned([{**shared, "state_dict.mean": torch.zeros(3)}, shared, shared])
    assert max(same) < 100
    assert different[0] > 10_000  # the whole list, once
    assert max(different[1:]) < 200


def test_a_tensor_of_another_shape_is_refused_on_every_rank():
    shared = weights(3)
    other = {**shared, "state_dict.layers.1.weight": torch.zeros(5)}
    with pytest.raises(CheckpointError, match=r"layers.1.weight' is float32 of shape \(4,\) on rank 0, and float32 of"):
        planned([shared, shared, other])


class OneOf(Ranks):
    """One of many ranks that all have the same tensors, and write different amounts already."""

    def __init__(self, rank, loads):
        self.rank, self.size, self.loads = rank, len(loads), loads

    def exchange(self, message):
        parsed = parse_json(message) if message else None
        if isinstance(parsed, list):
            return [dump_json([parsed[0], load]) for load in self.loads]
        return [message] * self.size


@pytest.mark.parametrize("seed", range(5))
def test_each_tensor_goes_to_the_rank_with_least_to_write(seed):
    chance = random.Random(seed)
    sizes = {f"tensor {number:03}": chance.choice([1, 2, 3, 50, 400]) for number in range(80)}
    tensors = {name: torch.zeros(size) for name, size in sizes.items()}
    loads = [chance.choice([0, 0, 100, 3000]) for _ in range(13)]
    written = {
        payload.name: rank
        for rank in range(len(loads))
        for payload in make_write_plan(tensor_layouts(tensors), {}, OneOf(rank, loads)).payloads
    }
    expected, totals = {}, list(loads)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        expected[name] = min(range(len(totals)), key=totals.__getitem__)
        totals[expected[name]] += 4 * sizes[name]
    assert written == expected


def test_an_error_that_is_not_utf_8_is_sent_all_the_same():
    with pytest.raises(CheckpointError, match=r"could not save: ValueError: no \?"), Ranks().on_all_ranks("save"):
        raise ValueError("no \udcff")
