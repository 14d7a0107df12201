"""Iterable datasets that are divided between processes and workers."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset

from dstrat import ShardedIterableDataset
from dstrat.data.loaders import length_of, prepare_evaluation_loader, prepare_training_loader


class Stream(IterableDataset):
    def __init__(self, count):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Measured(Stream):
    epoch = None

    def __len__(self):
        return self.count

    def set_epoch(self, epoch):
        self.epoch = epoch


def samples_of(count, *, rank, num_replicas, worker, num_workers, batch_size, pads):
    part = ShardedIterableDataset(Stream(count)).divided(
        rank=rank, num_replicas=num_replicas, batch_size=batch_size, pads=pads
    )
    return list(part._evenly(worker, num_workers) if pads else part._once(worker, num_workers))


def batches_of(count, *, num_workers, batch_size, **options):
    """The batches of a process, in the order in which a loader takes them from its workers."""
    workers = [
        samples_of(count, worker=worker, num_workers=num_workers, batch_size=batch_size, **options)
        for worker in range(num_workers)
    ]
    in_batches = [[own[i : i + batch_size] for i in range(0, len(own), batch_size)] for own in workers]
    turns = itertools.zip_longest(*in_batches)
    return [batch for turn in turns for batch in turn if batch is not None]


sizes = {
    "count": st.integers(0, 40),
    "num_replicas": st.integers(1, 4),
    "num_workers": st.integers(1, 3),
    "batch_size": st.integers(1, 4),
}


@given(**sizes)
def test_in_evaluation_each_sample_is_read_once_and_batches_are_those_of_one_process(
    count, num_replicas, num_workers, batch_size
):
    parts = [
        batches_of(count, rank=r, num_replicas=num_replicas, num_workers=num_workers, batch_size=batch_size, pads=False)
        for r in range(num_replicas)
    ]
    in_order = [batch for turn in itertools.zip_longest(*parts) for batch in turn if batch is not None]
    assert list(itertools.chain(*in_order)) == list(range(count))
    assert all(len(batch) == batch_size for batch in in_order[:-1])


@given(**sizes)
def test_in_training_all_processes_get_equally_many_and_no_sample_is_lost(count, num_replicas, num_workers, batch_size):
    parts = [
        batches_of(count, rank=r, num_replicas=num_replicas, num_workers=num_workers, batch_size=batch_size, pads=True)
        for r in range(num_replicas)
    ]
    assert len({tuple(map(len, part)) for part in parts}) == 1
    found = Counter(itertools.chain(*itertools.chain(*parts)))
    assert set(found) == set(range(count))
    assert sum(found.values()) - count < num_replicas
    for step, batches in enumerate(zip(*parts, strict=True)):  # the same samples for any number of workers
        size = batch_size * num_replicas
        assert set(itertools.chain(*batches)) >= set(range(step * size, min(count, (step + 1) * size)))


@given(**{name: sizes[name] for name in ("count", "num_replicas", "batch_size")}, pads=st.booleans())
def test_the_length_is_the_number_of_samples_of_the_process(count, num_replicas, batch_size, pads):
    for rank in range(num_replicas):
        options = {"rank": rank, "num_replicas": num_replicas, "batch_size": batch_size, "pads": pads}
        part = ShardedIterableDataset(Measured(count)).divided(**options)
        assert len(part) == len(list(part))


@pytest.mark.filterwarnings("ignore:This DataLoader will create 3 worker processes:UserWarning")  # on two cores
@pytest.mark.parametrize("num_workers", [0, 1, 3])
def test_workers_of_one_process_divide_the_stream_between_them(process, num_workers):
    loader = DataLoader(ShardedIterableDataset(Stream(10)), batch_size=2, num_workers=num_workers)
    for prepared in (
        prepare_training_loader(loader, process(0, 1), distribute=True),
        prepare_evaluation_loader(loader, process(0, 1), distribute=True)[0],
    ):
        assert [batch.tolist() for batch in prepared] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_loaders_of_several_processes_read_different_parts(process, num_workers):
    loader = DataLoader(ShardedIterableDataset(Stream(11)), batch_size=2, num_workers=num_workers)
    training = [prepare_training_loader(loader, process(rank, 2), distribute=True) for rank in range(2)]
    assert [[batch.tolist() for batch in part] for part in training] == [
        [[0, 2], [4, 6], [8, 10]],
        [[1, 3], [5, 7], [9, 1]],
    ]
    evaluation = [prepare_evaluation_loader(loader, process(rank, 2), distribute=True) for rank in range(2)]
    assert [divided for _, divided in evaluation] == [True, True]
    assert [[batch.tolist() for batch in part] for part, _ in evaluation] == [
        [[0, 1], [4, 5], [8, 9]],
        [[2, 3], [6, 7], [10]],
    ]


def test_a_stream_of_whole_batches_is_divided_too(process):
    loader = DataLoader(ShardedIterableDataset(Stream(5)), batch_size=None)
    assert list(prepare_evaluation_loader(loader, process(1, 2), distribute=True)[0]) == [1, 3]


def test_the_loader_has_a_length_where_the_stream_has_one(process):
    measured, unknown = (DataLoader(ShardedIterableDataset(kind(11)), batch_size=2) for kind in (Measured, Stream))
    assert length_of(prepare_training_loader(measured, process(0, 2), distribute=True)) == 3
    assert length_of(prepare_training_loader(unknown, process(0, 2), distribute=True)) is None


def test_the_stream_is_told_of_the_epoch():
    dataset = ShardedIterableDataset(Measured(3))
    dataset.set_epoch(2)
    assert dataset.dataset.epoch == 2
    ShardedIterableDataset(Stream(3)).set_epoch(2)
