"""Data modules made of datasets."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch.utils.data import IterableDataset, RandomSampler, TensorDataset

from dstrat import DataModule
from dstrat.errors import MisuseError


def dataset(count):
    return TensorDataset(torch.ones(count, 8), torch.ones(count, 1))


class Stream(IterableDataset):
    """Two samples."""

    def __iter__(self):
        return iter([(torch.ones(8), torch.ones(1))] * 2)


def test_datasets_make_a_data_module_that_shuffles_what_is_trained_on(quiet_trainer, line):
    data = DataModule.from_datasets(dataset(8), [dataset(4), dataset(6)], predict_dataset=dataset(3), batch_size=2)
    trainer = quiet_trainer(max_epochs=1)
    trainer.fit(line, datamodule=pickle.loads(pickle.dumps(data)))
    assert (trainer.global_step, trainer.num_val_batches) == (4, [2, 3])
    assert len(quiet_trainer().predict(line, datamodule=data)) == 2
    assert isinstance(data.train_dataloader().sampler, RandomSampler)
    assert not any(isinstance(loader.sampler, RandomSampler) for loader in data.val_dataloader())
    with pytest.raises(MisuseError, match="there is no test loader"):
        quiet_trainer().test(line, datamodule=data)


def test_its_class_gets_its_own_arguments_and_streams_stay_in_order(quiet_trainer, line):
    class Own(DataModule):
        def __init__(self, name):
            super().__init__()
            self.name = name

    data = Own.from_datasets({"a": Stream()}, name="mine")
    assert (type(data), data.name) == (Own, "mine")
    assert list(data.train_dataloader()) == ["a"]


def test_class_that_takes_the_batch_size_gets_that_of_its_loaders():
    class Sized(DataModule):
        def __init__(self, batch_size=1):
            super().__init__()
            self.batch_size = batch_size

    class Open(DataModule):
        def __init__(self, num_workers, **options):
            super().__init__()
            self.options = {"num_workers": num_workers, **options}

    assert Sized.from_datasets(dataset(8), batch_size=4).batch_size == 4
    assert Open.from_datasets(dataset(8), name="x").options == {"num_workers": 0, "batch_size": 1, "name": "x"}
