"""Batches on their way to the device."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from dstrat import DataModule, SingleDeviceStrategy
from dstrat.data.prefetch import move_batches, prefetch
from dstrat.errors import MisuseError
from dstrat.interfaces.batch import mover_to
from dstrat.training.loops.batches import Batches, batch_mover, can_copy_ahead


class Noting:
    """A loader that notes how many batches were asked of it."""

    def __init__(self, count, *, has_length):
        self.count, self.asked = count, 0
        if has_length:
            self.__class__ = type("Measured", (Noting,), {"__len__": lambda self: self.count})

    def __iter__(self):
        for index in range(self.count):
            self.asked += 1
            yield index


class Announced(IterableDataset):
    """A stream that announces more than it has."""

    def __iter__(self):
        return iter([1, 2])

    def __len__(self):
        return 5


class Conditions:
    """What a mover asks of a run."""

    def __init__(self, strategy, module, datamodule=None):
        self.strategy, self.module, self.datamodule = strategy, module, datamodule


def found(loader, count):
    return list(Batches(loader, count))


@pytest.mark.parametrize("has_length", [True, False])
def test_each_batch_comes_with_whether_it_is_the_last(has_length):
    assert found(Noting(3, has_length=has_length), 3) == [(0, False), (1, False), (2, True)]
    assert found(Noting(3, has_length=has_length), 2) == [(0, False), (1, True)]
    assert found(Noting(1, has_length=has_length), 1) == [(0, True)]
    assert found(Noting(3, has_length=has_length), 0) == []
    assert found(Noting(3, has_length=False), None) == [(0, False), (1, False), (2, True)]


@pytest.mark.parametrize(("has_length", "asked"), [(True, 1), (False, 2)])
def test_only_a_loader_of_unknown_length_is_read_ahead(has_length, asked):
    loader = Noting(3, has_length=has_length)
    next(iter(Batches(loader, 3 if has_length else None)))
    assert loader.asked == asked


def test_a_stream_that_announced_more_than_it_has_has_a_last_batch_nevertheless():
    loader = DataLoader(Announced(), batch_size=None)
    assert found(loader, len(loader)) == [(1, False), (2, True)]


def test_no_batch_where_one_is_needed_is_an_error_that_says_what_to_pass():
    exhausted = iter([1])
    assert list(Batches(exhausted, None, "training")) == [(1, True)]
    with pytest.raises(
        MisuseError, match=r"training loader \(a list_iterator\) gave no batch: .*starts anew with each"
    ):
        list(Batches(exhausted, None, "training"))
    assert list(Batches(exhausted, None)) == list(Batches(exhausted, 0, "training")) == []


@pytest.fixture
def strategy(quiet_trainer):
    return quiet_trainer().strategy


def test_batches_are_copied_ahead_where_the_device_has_streams(strategy, line, line_class):
    class Hooked(line_class):
        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch

    assert can_copy_ahead(Conditions(strategy, line)) == (strategy.root_device.type != "cpu")
    assert not can_copy_ahead(Conditions(strategy, Hooked()))


def test_batches_are_moved_when_they_are_due(strategy):
    noted = []

    def move(pair):
        noted.append(pair)
        return -pair[0], pair[1]

    batches = move_batches(Batches(range(3), 3), move, strategy, in_threads=False, ahead=False)
    assert next(batches) == (0, False)
    assert noted == [(0, False)]
    assert list(batches) == [(-1, False), (-2, True)]


def test_a_batch_that_is_on_the_device_stays_the_same_object(strategy, line):
    batch = strategy.batch_to_device([torch.ones(2), {"x": torch.ones(2)}])
    assert batch_mover(Conditions(strategy, line), 0)(batch) is batch


@pytest.mark.parametrize("owner", ["module", "data module"])
def test_overridden_transfer_hooks_are_called_in_their_order(strategy, make_line, owner):
    class Hooks:
        def on_before_batch_transfer(self, batch, dataloader_idx):
            return [*batch, ("before", dataloader_idx)]

        def transfer_batch_to_device(self, batch, device, dataloader_idx):
            return [*batch, ("transfer", str(device), dataloader_idx)]

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return [*batch, ("after", dataloader_idx)]

    class Module(Hooks, type(make_line())):
        pass

    class Data(Hooks, DataModule):
        pass

    module, data = (make_line(Module), None) if owner == "module" else (make_line(), Data())
    move = batch_mover(Conditions(strategy, module, data), 1)
    assert move([]) == [("before", 1), ("transfer", str(strategy.root_device), 1), ("after", 1)]


def test_a_batch_that_cannot_be_moved_ends_training_with_an_error_that_says_what_to_do(quiet_trainer, make_line):
    class Sealed:
        def __init__(self):
            self.x = torch.ones(2)

    class Elsewhere(SingleDeviceStrategy):
        """Wants batches on a device that every machine has, and that is never the module's."""

        def batch_to_device(self, batch):
            from dstrat.interfaces.batch import move_to_device

            return move_to_device(batch, torch.device("meta"))

    trainer = quiet_trainer(strategy=Elsewhere())
    with pytest.raises(
        MisuseError, match=r"Sealed, which holds tensors \(x\) and has no method to\(device\): override"
    ):
        trainer.fit(make_line(), DataLoader([Sealed()], batch_size=None))


@pytest.mark.cuda
class TestCopiesAhead:
    device = torch.device("cuda", 0)

    def copied(self, batches):
        return prefetch(batches, mover_to(self.device, pins=True), self.device)

    def test_batches_arrive_whole_while_steps_are_computed(self):
        size = 1 << 22
        host = [({"x": torch.full((size,), float(index))}, index == 19) for index in range(20)]
        work = torch.randn(4096, 4096, device=self.device)
        sums = []
        for index, (batch, is_last) in enumerate(self.copied(host)):
            work = work @ work / 64  # keeps the device busy, so that copies and steps overlap
            sums.append((batch["x"].double().sum(), is_last))
            del batch
            assert is_last == (index == 19)
        assert [total.item() / size for total, _ in sums] == [float(index) for index in range(20)]

    def test_the_next_batch_is_copied_before_the_step_and_no_more_than_one(self):
        asked = []

        def host():
            for index in range(4):
                asked.append(index)
                yield {"x": torch.ones(2)}, index == 3

        batches = self.copied(host())
        next(batches)
        assert asked == [0, 1]
        next(batches)
        assert asked == [0, 1, 2]

    def test_old_batches_are_freed(self):
        references = []
        for batch, _ in self.copied(({"x": torch.ones(1 << 20)}, False) for _ in range(5)):
            references.append(weakref.ref(batch["x"]))
            del batch
            gc.collect()
            assert sum(reference() is not None for reference in references) <= 1

    def test_training_equals_that_with_a_hook_that_copies_when_due(self, quiet_trainer, make_line, loader):
        class Due(type(make_line())):
            def on_after_batch_transfer(self, batch, dataloader_idx):
                return batch

        trained = []
        for kind in (type(make_line()), Due):
            module = make_line(kind)
            quiet_trainer(accelerator="gpu", devices=1).fit(module, loader(pin_memory=True))
            trained.append(module.layer.weight.detach().cpu())
        assert torch.equal(*trained)
