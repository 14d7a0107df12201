"""Predictions that each process writes by itself."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, SubsetRandomSampler

from dstrat import PredictionWriter, TorchPredictionWriter, TrainModule, read_predictions
from dstrat.data.division import record_batches, take_indices
from dstrat.errors import MisuseError, RankFailedError, RequestError


class Doubling(TrainModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return {"doubled": batch * 2}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(range(5))


class Noting(PredictionWriter):
    def __init__(self, write_interval):
        super().__init__(write_interval)
        self.calls = []

    def write_on_batch_end(self, trainer, module, prediction, batch_indices, batch, batch_idx, dataloader_idx):
        assert torch.equal(prediction["doubled"], batch * 2)
        self.calls.append((batch_indices, batch_idx, dataloader_idx))

    def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
        self.calls.append((values(predictions), batch_indices))


def numbers(count, **options):
    return DataLoader(torch.arange(count), **options)


def values(predictions):
    if isinstance(predictions, dict):
        return predictions["doubled"].tolist()
    return [values(part) for part in predictions]


def predicted(trainer_of, writer, loaders, **options):
    trainer = trainer_of(callbacks=[writer], **options)
    return trainer.predict(Doubling(), loaders, return_predictions=False)


@pytest.mark.parametrize(
    ("interval", "calls"),
    [
        ("batch", [([0, 1], 0, 0), ([2], 1, 0)]),
        ("epoch", [([[0, 2], [4]], [[[0, 1], [2]]])]),
        ("batch_and_epoch", [([0, 1], 0, 0), ([2], 1, 0), ([[0, 2], [4]], [[[0, 1], [2]]])]),
    ],
)
def test_predictions_come_when_they_are_asked_for_with_the_indices_of_their_samples(quiet_trainer, interval, calls):
    writer = Noting(interval)
    assert predicted(quiet_trainer, writer, numbers(3, batch_size=2)) == []
    assert writer.calls == calls


def test_several_loaders_have_a_list_each(quiet_trainer):
    writer = Noting("batch_and_epoch")
    predicted(quiet_trainer, writer, {"a": numbers(1), "b": numbers(2, batch_size=2)})
    assert writer.calls == [([0], 0, 0), ([0, 1], 0, 1), ([[[0]], [[0, 2]]], [[[0]], [[0, 1]]])]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_indices_are_those_of_the_batch_whatever_was_read_ahead(quiet_trainer, num_workers):
    writer = Noting("epoch")
    loader = numbers(20, batch_size=3, num_workers=num_workers, sampler=SubsetRandomSampler(range(20)))
    predicted(quiet_trainer, writer, loader, limit_predict_batches=5)
    [(predictions, [indices])] = writer.calls  # the indices of one loader
    assert predictions == [[2 * index for index in batch] for batch in indices]
    assert len(indices) == 5


def test_a_loader_without_batches_of_samples_gives_one_index_each(quiet_trainer):
    writer = Noting("batch")
    predicted(quiet_trainer, writer, numbers(2, batch_size=None))
    assert writer.calls == [([0], 0, 0), ([1], 1, 0)]


def test_a_stream_has_no_indices(quiet_trainer):
    writer = Noting("batch")
    predicted(quiet_trainer, writer, DataLoader(Stream(), batch_size=3))
    assert writer.calls == [(None, 0, 0), (None, 1, 0)]


def test_two_writers_both_know_the_indices(quiet_trainer):
    writers = [Noting("batch"), Noting("epoch")]
    quiet_trainer(callbacks=writers).predict(Doubling(), numbers(1), return_predictions=False)
    assert [writer.calls for writer in writers] == [[([0], 0, 0)], [([[0]], [[[0]]])]]


def test_indices_are_those_of_the_batch_also_after_a_reading_that_was_broken_off():
    loader = record_batches(numbers(6, batch_size=2, num_workers=1))
    next(iter(loader))
    assert [take_indices(loader) for _ in loader] == [[0, 1], [2, 3], [4, 5]]


@pytest.mark.cuda
def test_predictions_are_kept_on_the_cpu(quiet_trainer):
    class Asking(Noting):
        def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
            assert {prediction["doubled"].device.type for prediction in predictions} == {"cpu"}
            super().write_on_epoch_end(trainer, module, predictions, batch_indices)

    writer = Asking("epoch")
    predicted(quiet_trainer, writer, numbers(3), accelerator="gpu", devices=1)
    assert writer.calls == [([[0], [2], [4]], [[[0], [1], [2]]])]


def test_an_interval_whose_method_is_missing_is_an_error():
    class Half(PredictionWriter):
        def write_on_batch_end(self, *args):
            pass

    Half("batch")
    with pytest.raises(
        MisuseError, match="Half has no write_on_epoch_end, which write_interval='batch_and_epoch' needs"
    ):
        Half("batch_and_epoch")
    with pytest.raises(RequestError, match="write_interval='step' must be one of 'batch', 'epoch', 'batch_and_epoch'"):
        Half("step")


# Files of torch


@pytest.mark.parametrize("interval", ["batch", "epoch"])
@pytest.mark.parametrize("devices", [1, 3])
def test_what_is_read_is_what_predict_returns(quiet_trainer, averaging, tmp_path, interval, devices):
    options = {"strategy": averaging(), "devices": devices} if devices > 1 else {}
    loaders = [numbers(10, batch_size=2), numbers(3)]
    writer = TorchPredictionWriter(tmp_path / "predictions", interval)
    returned = quiet_trainer(callbacks=[writer], **options).predict(Doubling(), loaders)
    found = read_predictions(tmp_path / "predictions")
    assert values(found) == values(returned) == [[[0, 2], [4, 6], [8, 10], [12, 14], [16, 18]], [[0], [2], [4]]]
    num_files = {"batch": 8, "epoch": 2 * devices}[interval]
    assert len(list(writer.folder.iterdir())) == num_files


def test_more_than_ten_batches_of_a_stream_stay_in_order(quiet_trainer, tmp_path):
    class Long(IterableDataset):
        def __iter__(self):
            return iter(range(12))

    predicted(quiet_trainer, TorchPredictionWriter(tmp_path, "batch"), DataLoader(Long(), batch_size=1))
    assert values(read_predictions(tmp_path)) == [[2 * number] for number in range(12)]


def test_what_every_process_predicted_is_read_once(quiet_trainer, averaging, tmp_path):
    options = {"strategy": averaging(), "devices": 2, "use_distributed_sampler": False}
    predicted(quiet_trainer, TorchPredictionWriter(tmp_path), numbers(3), **options)
    assert values(read_predictions(tmp_path)) == [[0], [2], [4]]


def test_old_predictions_are_not_mixed_with_new_ones(quiet_trainer, averaging, tmp_path):
    writer = TorchPredictionWriter(tmp_path)
    predicted(quiet_trainer, writer, numbers(3))
    with pytest.raises(RequestError, match=r"holds predictions already \(rank0_loader0.pt\): remove them, or choose"):
        predicted(quiet_trainer, writer, numbers(3))
    with pytest.raises(RankFailedError, match="holds predictions already"):
        predicted(quiet_trainer, writer, numbers(3), strategy=averaging(), devices=2)
    (tmp_path / "rank0_loader0.pt").rename(tmp_path / "rank1_loader0.pt")
    with pytest.raises(RequestError, match=r"\(rank1_loader0.pt\)"):
        predicted(quiet_trainer, writer, numbers(3))


def test_a_folder_without_predictions_is_an_error(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(RequestError, match="holds no predictions of a TorchPredictionWriter"):
            read_predictions(folder)


def test_writing_both_ways_is_an_error(tmp_path):
    with pytest.raises(
        RequestError, match="write_interval='batch_and_epoch' of TorchPredictionWriter must be 'batch' or"
    ):
        TorchPredictionWriter(tmp_path, "batch_and_epoch")


def test_what_was_written_batch_by_batch_is_not_kept(quiet_trainer):
    class Forgetting(Noting):
        def write_on_batch_end(self, trainer, module, prediction, *_):
            self.calls.append(weakref.ref(prediction["doubled"]))

        def on_predict_epoch_end(self, trainer, module):
            self.alive = sum(reference() is not None for reference in self.calls)
            super().on_predict_epoch_end(trainer, module)

    writer = Forgetting("batch")
    predicted(quiet_trainer, writer, numbers(8))
    assert len(writer.calls) == 8
    assert writer.alive <= 1


def test_what_was_written_at_the_end_is_not_kept(quiet_trainer):
    class Forgetting(Noting):
        def write_on_epoch_end(self, trainer, module, predictions, batch_indices):
            self.calls = [weakref.ref(prediction["doubled"]) for prediction in predictions]

    writer = Forgetting("epoch")
    predicted(quiet_trainer, writer, numbers(8))
    assert [reference() for reference in writer.calls] == [None] * 8


def test_files_of_another_rank_that_began_earlier_and_of_another_stage_do_not_matter(tmp_path):
    writer = TorchPredictionWriter(tmp_path / "new")
    writer.setup(SimpleNamespace(global_rank=0, world_size=2), None, "fit")
    assert not writer.folder.exists()
    writer.folder.mkdir()
    (writer.folder / "rank1_loader0_batch0.pt").touch()
    writer.setup(SimpleNamespace(global_rank=0, world_size=2), None, "predict")
    with pytest.raises(RequestError, match="holds predictions already"):
        writer.setup(SimpleNamespace(global_rank=1, world_size=2), None, "predict")
