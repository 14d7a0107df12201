"""From the user's loaders to those that a process reads."""

from __future__ import annotations

import os
from collections import Counter
from types import MappingProxyType

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from dstrat import CombinedLoader
from dstrat.data.equal_length import ShortestLoader
from dstrat.data.limits import limit_of
from dstrat.data.loaders import (
    as_list,
    check_loaders,
    length_is_certain,
    length_of,
    prepare_evaluation_loader,
    prepare_training_loader,
)
from dstrat.data.samplers import set_epoch
from dstrat.errors import MisuseError, RankFailedError, RequestError


class Stream(IterableDataset):
    def __init__(self, count=4):
        self.count = count

    def __iter__(self):
        return iter(range(self.count))


class Announced(Stream):
    def __len__(self):
        return 100


class Own:
    """An iterable that is no DataLoader."""

    def __iter__(self):
        return iter([1, 2])


class Reversed(SequentialSampler):
    epochs = ()

    def __iter__(self):
        return reversed(range(len(self)))

    def set_epoch(self, epoch):
        self.epochs = (*self.epochs, epoch)


def numbers(count, **options):
    return DataLoader(list(range(count)), **options)


def training(loader, process, world_size=2, **options):
    """What all processes train from."""
    options = {"distribute": True, **options}
    return [prepare_training_loader(loader, process(rank, world_size), **options) for rank in range(world_size)]


def evaluation(loader, process, world_size=2):
    """What all processes evaluate, batch by batch in the order of the job."""
    parts = [
        list(prepare_evaluation_loader(loader, process(rank, world_size), distribute=True)[0])
        for rank in range(world_size)
    ]
    return [part[index] for index in range(max(map(len, parts))) for part in parts if index < len(part)]


def lists(batches):
    return [batch.tolist() if isinstance(batch, torch.Tensor) else batch for batch in batches]


class ByEpoch(SequentialSampler):
    """Two indices, other ones in each epoch."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        return iter([2 * self.epoch, 2 * self.epoch + 1])

    def __len__(self):
        return 2


@pytest.mark.parametrize("world_size", [1, 2])
def test_samplers_of_evaluation_get_the_epoch(process, world_size):
    def prepared(rank):
        loader = numbers(8, sampler=ByEpoch(range(8)))
        return prepare_evaluation_loader(loader, process(rank, world_size), distribute=True)[0]

    loaders = [prepared(rank) for rank in range(world_size)]
    for epoch in (0, 3, 1):
        for loader in loaders:
            set_epoch(loader, epoch, datasets=False)
        read = [number for loader in loaders for batch in loader for number in batch.tolist()]
        assert read == [2 * epoch, 2 * epoch + 1]


def test_validation_reads_by_the_epoch_of_training(quiet_trainer, line_class):
    class Noting(line_class):
        def loss(self, batch):
            return super().loss(batch[:2])

        def validation_step(self, batch, batch_idx):
            seen.append((self.trainer.current_epoch, batch[2].item()))

    def batches(sampler=None):
        return DataLoader(TensorDataset(torch.randn(8, 8), torch.randn(8, 1), torch.arange(8)), sampler=sampler)

    seen = []
    validation = batches(ByEpoch(range(8)))
    quiet_trainer(max_epochs=3, num_sanity_val_steps=0, limit_train_batches=1).fit(Noting(), batches(), validation)
    assert seen == [(epoch, 2 * epoch + index) for epoch in range(3) for index in range(2)]


# Training


def test_one_process_reads_what_the_user_gave():
    from dstrat import SingleDeviceStrategy

    loader = numbers(4)
    assert prepare_training_loader(loader, SingleDeviceStrategy("cpu"), distribute=True) is loader
    assert prepare_evaluation_loader(loader, SingleDeviceStrategy("cpu"), distribute=True) == (loader, False)


@pytest.mark.parametrize("shuffle", [False, True])
def test_processes_read_equal_parts_of_the_samples(process, shuffle):
    parts = [
        torch.cat(list(part)).tolist() for part in training(numbers(10, batch_size=2, shuffle=shuffle), process, 4)
    ]
    assert {len(part) for part in parts} == {3}
    assert set().union(*parts) == set(range(10))


def test_a_shuffled_order_changes_with_the_epoch_and_with_each_reading_in_it(process):
    [loader, other] = training(numbers(64, batch_size=64, shuffle=True), process)
    orders = []
    for epoch in (0, 1, 0):
        for part in (loader, other):
            set_epoch(part, epoch)
        orders += [next(iter(loader)).tolist(), next(iter(loader)).tolist()]
        assert set(orders[-2]).isdisjoint(next(iter(other)).tolist())
    assert orders[0] == orders[4]
    assert orders[1] == orders[5]
    assert len({tuple(order) for order in orders}) == 4


def test_a_generator_of_the_users_own_gives_the_order_as_on_one_device(process):
    def loader():
        return numbers(8, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(3))

    [[alone]] = [list(loader())]
    first, second = (next(iter(part)).tolist() for part in training(loader(), process))
    assert first == alone.tolist()[::2]
    assert len(second) == 4


@pytest.mark.parametrize(
    "sampler",
    [
        RandomSampler(range(8), replacement=True, num_samples=6),
        WeightedRandomSampler([1.0] * 8, 6),
        SubsetRandomSampler([1, 3, 5]),
        Reversed(range(8)),
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_a_sampler_of_the_users_own_keeps_its_order(process, sampler):
    loader = numbers(8, sampler=sampler)
    torch.manual_seed(0)
    alone = torch.cat(list(loader)).tolist()
    found = []
    for part in training(loader, process):
        torch.manual_seed(0)
        found.append(torch.cat(list(part)).tolist())
    padded = alone if len(alone) % 2 == 0 else [*alone, alone[0]]
    assert found == [padded[::2], padded[1::2]]


@pytest.mark.parametrize("world_size", [1, 2])
def test_set_epoch_reaches_the_samplers_of_all_loaders(process, world_size):
    samplers = [Reversed(range(4)) for _ in range(3)]
    loaders = [
        numbers(4, sampler=samplers[0]),
        {"a": numbers(4, batch_sampler=BatchSampler(samplers[1], 2, drop_last=False)), "b": Own()},
        CombinedLoader([numbers(4, sampler=samplers[2])]).iterables,
    ]
    prepared = training(loaders, process, world_size)[0]
    set_epoch(prepared, 7)
    next(iter(prepared))
    assert all(set(sampler.epochs) == {7} for sampler in samplers)


def test_several_loaders_are_read_together_until_the_longest_ends(process):
    given = {"a": numbers(8, batch_size=2), "b": [numbers(4, batch_size=2)]}
    first, second = training(given, process)
    assert len(first) == len(second) == 2
    assert [{"a": b["a"].tolist(), "b": b["b"][0].tolist()} for b in first] == [
        {"a": [0, 2], "b": [0, 2]},
        {"a": [4, 6], "b": [0, 2]},
    ]
    assert [b["a"].tolist() for b in second] == [[1, 3], [5, 7]]


def test_a_combined_loader_keeps_its_mode(process):
    combined = CombinedLoader([numbers(8), numbers(4)], "sequential")
    assert [len(part) for part in training(combined, process)] == [6, 6]


def test_what_cannot_be_divided_is_told_once_for_the_job(process, caplog):
    training([DataLoader(Stream()), Own()], process)
    reasons = [
        "has an iterable dataset, which dstrat divides only inside a dstrat.ShardedIterableDataset",
        "is of type Own, and dstrat divides only a DataLoader",
    ]
    end = "unless it divides itself by rank, each of the 2 processes reads all of it"
    assert [record.message for record in caplog.records] == [f"the training loader {why}: {end}" for why in reasons]


def test_only_a_counted_length_is_certain(process):
    assert length_is_certain(CombinedLoader([numbers(4), numbers(3)]))
    for loader in (DataLoader(Stream()), DataLoader(Announced()), Own(), CombinedLoader([numbers(4), Own()])):
        assert not length_is_certain(loader)
        [prepared, _] = training(loader, process, distribute=False)
        assert isinstance(prepared, ShortestLoader)
        assert not length_is_certain(prepared)
        assert length_of(prepared) == length_of(loader)
    assert isinstance(training(numbers(4), process, distribute=False)[0], DataLoader)


def test_a_batch_sampler_of_the_users_own_is_an_error_that_says_what_to_do(process):
    class Buckets(BatchSampler):
        pass

    loader = numbers(4, batch_sampler=Buckets(SequentialSampler(range(4)), 2, drop_last=False))
    with pytest.raises(
        RequestError, match=r"batch sampler of its own \(Buckets\).*use_distributed_sampler=False\).*distribute=False"
    ):
        training(loader, process)


# Processes that read the same part


@pytest.fixture
def sharing(process):
    """Makes the strategy of one of several processes that all read all of the data, as they share each batch."""

    class Sharing(process):
        distributed_sampler_kwargs = MappingProxyType({"num_replicas": 1, "rank": 0})

    return Sharing


def read_by_each(make, prepare):
    """What processes read, each of which has drawn other random numbers before."""
    found = []
    for rank in range(2):
        torch.manual_seed(0)
        torch.rand(rank)
        found.append(torch.cat(list(prepare(make(), rank))).tolist())
    return found


def test_processes_that_share_batches_read_them_in_the_same_order(sharing, caplog):
    def trains(loader, rank):
        return prepare_training_loader(loader, sharing(rank, 2), distribute=True)

    def evaluates(loader, rank):
        prepared, divided = prepare_evaluation_loader(loader, sharing(rank, 2), distribute=True)
        assert not divided
        return prepared

    for prepare in (trains, evaluates):
        first, second = read_by_each(lambda: numbers(64, batch_size=2, shuffle=True), prepare)
        assert first == second != sorted(first)
        assert sorted(first) == list(range(64))
        assert read_by_each(lambda: DataLoader(Stream()), prepare) == [[0, 1, 2, 3]] * 2
    assert caplog.records == []


def test_processes_that_share_batches_keep_a_batch_sampler_of_the_users_own(sharing):
    class Buckets(BatchSampler):
        pass

    loader = numbers(4, batch_sampler=Buckets(SequentialSampler(range(4)), 2, drop_last=False))
    assert [lists(prepared) for prepared in training(loader, sharing)] == [lists(loader)] * 2


class Drawing:
    """A batch sampler with a generator of its own, and other batches in each epoch."""

    def __init__(self, generator):
        self.sampler, self.generator, self.epoch = Reversed(range(6)), generator, 0

    def __len__(self):
        return 3 + self.epoch

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        yield from torch.randint(6, (len(self), 2), generator=self.generator).tolist()


def test_processes_that_share_batches_read_those_that_the_first_draws_from_the_users_own_batch_sampler(sharing):
    sent = []

    class Sending(sharing):
        def broadcast(self, value, src=0):
            if self.global_rank == src:
                sent.append(value)
            return sent[-1]

    samplers = [Drawing(torch.Generator().manual_seed(rank)) for rank in range(2)]
    expected = Drawing(torch.Generator().manual_seed(0))
    loaders = [
        prepare_training_loader(numbers(6, batch_sampler=sampler), Sending(rank, 2), distribute=True)
        for rank, sampler in enumerate(samplers)
    ]
    for epoch in range(2):
        expected.set_epoch(epoch)
        drawn = list(expected)
        for loader in loaders:
            set_epoch(loader, epoch)
            assert len(loader) == 3 + epoch
            assert lists(loader) == drawn
    assert [sampler.sampler.epochs for sampler in samplers] == [(0, 1), (0, 1)]


def test_an_endless_batch_sampler_is_left_to_the_processes_that_share_batches_and_told(sharing, caplog):
    class Endless:
        def __iter__(self):
            while True:
                yield [0, 1]

    loader = numbers(4, batch_sampler=Endless())
    assert [prepared.loader for prepared in training(loader, sharing)] == [loader, loader]
    [record] = caplog.records
    assert record.message == (
        "the training loader has a batch sampler without a length (Endless): each of the 2 processes that share a "
        "batch draws from it, so it has to give all of them the same batches"
    )


@pytest.mark.parametrize("distribute", [True, False])
@pytest.mark.parametrize("is_grouped", [True, False])
@pytest.mark.parametrize("given", [{"num_replicas": 2, "rank": 1}, {"num_replicas": 1, "rank": 0}], ids=str)
def test_a_loader_that_is_divided_among_processes_that_share_batches_is_an_error(
    sharing, given, is_grouped, distribute
):
    class Buckets(BatchSampler):
        pass

    sampler, strategy = DistributedSampler(range(4), **given), sharing(1, 2)
    options = {"batch_sampler": Buckets(sampler, 1, drop_last=False)} if is_grouped else {"sampler": sampler}
    loader = numbers(4, **options)
    for purpose, prepare in (("training", prepare_training_loader), ("evaluation", prepare_evaluation_loader)):
        if given == strategy.distributed_sampler_kwargs:
            prepare(loader, strategy, distribute=distribute)
            continue
        with pytest.raises(MisuseError) as error:
            prepare(loader, strategy, distribute=distribute)
        assert str(error.value) == (
            f"the {purpose} loader has a DistributedSampler with num_replicas=2 and rank=1, and several of the 2 ranks "
            "of Sharing share each batch: pass it num_replicas=1 and rank=0, which "
            "strategy.distributed_sampler_kwargs has, or leave it out, as dstrat divides the loader"
        )


def test_a_loader_that_is_divided_in_another_way_is_left_to_the_user(process, sharing):
    for strategy, given in ((process(1, 2), {"num_replicas": 2, "rank": 0}), (sharing(0, 2), {"num_replicas": 4})):
        loader = numbers(4, sampler=DistributedSampler(range(4), **{"rank": 3, **given}))
        assert prepare_training_loader(loader, strategy, distribute=True) is loader


# Evaluation


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("options", [{"batch_size": 2}, {"batch_size": None}, {"batch_size": 3, "drop_last": True}])
def test_batches_of_all_processes_are_those_of_one(process, world_size, options):
    loader = numbers(10, **options)
    assert lists(evaluation(loader, process, world_size)) == lists(loader)


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_combined_batches_of_all_processes_are_those_of_one(process, mode, world_size):
    combined = CombinedLoader([numbers(9, batch_size=2), numbers(3, batch_size=1)], mode)
    assert [lists(b) for b in evaluation(combined, process, world_size)] == [lists(b) for b in combined]


def test_a_combined_loader_is_divided_as_a_whole_or_not_at_all(process, caplog):
    combined = CombinedLoader([numbers(4), Own()])
    loader, divided = prepare_evaluation_loader(combined, process(0, 2), distribute=True)
    assert (len(list(loader)), divided) == (2, False)
    assert "is of type Own" in caplog.text


def test_loaders_are_evaluated_one_after_the_other_unless_they_are_combined():
    a, b, c = numbers(1), numbers(2), numbers(3)
    assert as_list(None) == []
    assert as_list(a) == [a]
    assert as_list([a, (b, c)]) == as_list({"x": a, "y": {"z": b, "w": c}}) == [a, b, c]
    assert as_list(CombinedLoader([a, b], "sequential")) == [a, b]
    combined = CombinedLoader([a, b], "max_size")
    assert as_list(combined) == [combined]


# Errors


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        (numbers(0), r"the training loader has no batch: the length of the DataLoader is 0, so give"),
        ([numbers(2), {"a": numbers(0)}], r"the training loader\[1\]\['a'\] has no batch"),
        (
            numbers(3, batch_size=4, drop_last=True),
            "its 3 samples are fewer than batch_size=4, and drop_last=True leaves them out",
        ),
        (
            numbers(4, batch_size=4, drop_last=True),
            "the part of the training data of rank 0 has no batch: its 2 samples are fewer than batch_size=4",
        ),
    ],
)
def test_training_without_a_batch_is_an_error_that_says_why(process, loader, message):
    with pytest.raises(MisuseError, match=message):
        training(loader, process)


def test_evaluating_an_empty_loader_is_an_error(process):
    with pytest.raises(MisuseError, match="a loader for evaluation has no batch: the length of the"):
        evaluation(numbers(0), process)
    assert len(evaluation(numbers(1), process, 3)) == 1  # most processes have none, and that is fine


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "loader is a int, over which one cannot iterate: pass a DataLoader"),
        ({"a": [None]}, r"loader\['a'\]\[0\] is a NoneType, over which"),
        (
            [(torch.ones(2), torch.ones(2))],
            r"loader\[0\]\[0\] is of type Tensor, not a loader: .*batch_size=None",
        ),
        (["text"], r"loader\[0\] is of type str, not a loader"),
        (torch.utils.data.TensorDataset(torch.ones(2)), r"is a dataset \(TensorDataset\): pass DataLoader\(dataset, "),
        (CombinedLoader([4]), r"loader\[0\] is a int, over which"),
    ],
)
def test_what_is_no_loader_is_an_error_that_says_where_it_is(given, message):
    with pytest.raises(MisuseError, match=message):
        check_loaders(given, "the train loader")


@pytest.mark.parametrize("given", [numbers(1), [numbers(1)], Own(), {"a": Own()}, DataLoader([1]), Stream()])
def test_loaders_and_structures_of_them_pass(given):
    check_loaders(given, "the train loader")


def test_a_fraction_of_an_unknown_length_is_an_error():
    with pytest.raises(RequestError, match=r"limit_val_batches=0.5 is a fraction, and the loader has no length"):
        limit_of(0.5, length_of(Own()), "limit_val_batches")


def test_loaders_that_differ_between_processes_are_an_error_that_shows_them(
    quiet_trainer, make_line, averaging, loader
):
    module = make_line()
    module.train_dataloader = lambda: {"a": loader(), "b": loader()} if module.global_rank else [loader()]
    with pytest.raises(
        RankFailedError, match=r"\[DataLoader\] on rank 0, \{'a': DataLoader, 'b': DataLoader\} on rank 1"
    ):
        quiet_trainer(strategy=averaging(), devices=2).fit(module)


# Whole runs


def test_a_module_trains_on_several_loaders_with_the_same_result_on_one_and_two_processes(
    quiet_trainer, make_line, averaging, loader
):
    class Several(type(make_line())):
        def training_step(self, batch, batch_idx):
            return self.loss(batch["a"]) + self.loss(batch["b"][0])

    def trained(batch_size, **options):
        module = make_line(Several)
        loaders = {"a": loader(batch_size), "b": [loader(batch_size // 2, count=24)]}
        quiet_trainer(**options).fit(module, loaders)
        return torch.cat([parameter.detach().flatten() for parameter in module.parameters()])

    together = trained(4, strategy=averaging(), devices=2)  # before a backward pass here, after which no rank is forked
    torch.testing.assert_close(trained(8), together)


def test_a_limit_counts_batches_of_each_loader(quiet_trainer, make_line, loader):
    seen = Counter()

    class Several(type(make_line())):
        def validation_step(self, batch, batch_idx, dataloader_idx=0):
            seen[dataloader_idx] += 1

    quiet_trainer(limit_val_batches=2).validate(make_line(Several), {"a": loader(), "b": [loader(count=8)]})
    assert seen == {0: 2, 1: 1}


class Epochs(Dataset):
    """Its samples are its epoch and the process that reads it."""

    epoch = 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return self.epoch, os.getpid()


class SharedEpochs(Epochs):
    """Its epoch is in shared memory, as that of a stream of Hugging Face."""

    def __init__(self):
        self.shared = torch.zeros(1, dtype=torch.int64).share_memory_()

    def set_epoch(self, epoch):
        self.shared.fill_(epoch)

    def __getitem__(self, index):
        return int(self.shared), os.getpid()


class SharedSamples(Epochs):
    """Its samples are in shared memory, and its epoch is not."""

    def __init__(self):
        self.samples = torch.ones(2).share_memory_()


class SharedMasks(SharedSamples):
    """It also changes its samples in shared memory."""

    def set_epoch(self, epoch):
        super().set_epoch(epoch)
        self.samples.fill_(-epoch)


@pytest.mark.parametrize("dataset", [Epochs, SharedEpochs, SharedSamples, SharedMasks])
def test_set_epoch_reaches_persistent_workers(quiet_trainer, line_class, dataset):
    seen, workers = [], set()

    class Seeing(line_class):
        def training_step(self, batch, batch_idx):
            epoch, worker = batch
            seen.append(epoch.item())
            workers.add(worker.item())
            return self.layer.weight.sum()

    loader = DataLoader(dataset(), num_workers=1, persistent_workers=True, multiprocessing_context="fork")
    quiet_trainer(max_epochs=3).fit(Seeing(), loader)
    assert seen == [0, 0, 1, 1, 2, 2]
    assert len(workers) == (1 if dataset is SharedEpochs else 3)  # only where the epoch is not shared they start again
