"""Lazy execution: one graph for each step of the optimizer, and values that are read late."""

from __future__ import annotations

import dataclasses
import logging
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset
from xla_fit import Counting, Counts, Regression, data, losses_of, trainer

from dstrat import OwnLoop, TrainModule, build
from dstrat.data.combined_loader import CombinedLoader
from dstrat.data.division import with_attributes
from dstrat.data.samplers import RankBatchSampler
from dstrat.errors import MisuseError
from dstrat.loggers import CSVLogger

WAYS = {  # epochs, arguments
    "scheduled": (6, {}),
    "accumulating unevenly and clipping": (3, {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1}),
    "bf16-mixed": (2, {"precision": "bf16-mixed"}),
    "bf16-true": (2, {"precision": "bf16-true"}),
}


@pytest.mark.parametrize("way", WAYS)
def test_steps_after_the_first_epoch_compile_nothing(way):
    epochs, arguments = WAYS[way]
    counting, module = Counting(), Regression(dropout=0.1, scheduled=way == "scheduled")
    trainer(max_epochs=epochs, callbacks=[counting], **arguments).fit(module, data())
    assert len(module.losses) == 20 * epochs
    assert counting.epochs[-1].since(counting.epochs[0]).compiled == 0


@pytest.mark.parametrize("accumulate", [1, 4])
def test_the_graph_is_cut_after_optimizer_steps_only(accumulate):
    counting, module = Counting(), Regression()
    fit = trainer(max_epochs=2, callbacks=[counting], accumulate_grad_batches=accumulate)
    fit.fit(module, data(64))
    in_second_epoch = counting.batches[-1].since(counting.batches[7])
    assert in_second_epoch.cut == 8 // accumulate
    # Beside those, the mean over the first epoch has been computed.
    assert in_second_epoch.executed <= 8 // accumulate + 1


def test_values_are_copied_once_for_each_logging_interval(tmp_path):
    counting = Counting()
    fit = trainer(callbacks=[counting], logger=CSVLogger(tmp_path), log_every_n_steps=10)
    fit.fit(Regression(), data(samples=8 * 50))
    between = counting.batches[48].since(counting.batches[4])  # 44 steps, after 10, 20, 30 and 40 of which it logs
    assert between.copied == 4
    assert between.compiled == 0


def test_the_bar_and_loggers_compile_nothing_to_read_values(tmp_path):
    counting = Counting()
    fit = trainer(max_epochs=4, callbacks=[counting], logger=CSVLogger(tmp_path), enable_progress_bar=True)
    fit.fit(Regression(), data(64), data(40, shuffle=False))
    assert counting.epochs[-1].since(counting.epochs[1]).compiled == 0


def test_validation_has_graphs_of_its_own():
    with_validation, without = Counting(), Counting()
    trainer(max_epochs=3, callbacks=[without]).fit(Regression(), data(64))
    trainer(max_epochs=3, callbacks=[with_validation], num_sanity_val_steps=0).fit(
        Regression(), data(64), data(40, shuffle=False)
    )
    assert with_validation.epochs[-1].since(with_validation.epochs[0]).compiled == 0
    last_epochs = [one.batches[-1].since(one.batches[7]) for one in (with_validation, without)]
    # Five batches are cut in each of two validations, and where these begin and end.
    assert last_epochs[0].cut - last_epochs[1].cut == 2 * (5 + 2)


def test_each_batch_of_a_prediction_runs_by_itself():
    module, start = Regression(), Counts.now()
    predictions = trainer().predict(module, data(80, shuffle=False))
    assert len(predictions) == 10
    assert Counts.now().since(start).executed >= 10
    again = Counts.now()
    trainer().predict(module, data(80, shuffle=False))
    assert Counts.now().since(again).compiled == 0


def test_manual_optimization_is_cut_after_each_optimizer():
    class Adversaries(TrainModule):
        automatic_optimization = False

        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(16, 1), nn.Linear(16, 1)

        def training_step(self, batch, batch_idx):
            for part, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
                optimizer.zero_grad()
                self.manual_backward(nn.functional.mse_loss(part(batch[0]), batch[1]))
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(part.parameters(), lr=0.01) for part in (self.one, self.other)]

    counting = Counting()
    trainer(max_epochs=2, callbacks=[counting]).fit(Adversaries(), data(64))
    second_epoch = counting.batches[-1].since(counting.batches[7])
    assert (second_epoch.cut, second_epoch.compiled) == (16, 0)


def test_an_own_loop_compiles_nothing_after_its_first_steps():
    def train(loop):
        module = nn.Linear(16, 1)
        loop.setup(module, lambda module: torch.optim.Adam(module.parameters()))
        counts = []
        for batch in loop.training_loader(data(400)):
            loop.backward(loop.compute(nn.functional.mse_loss, module(batch[0]), batch[1]))
            loop.step()
            counts.append(Counts.now())
        return counts[-1].since(counts[4])

    counted = OwnLoop(build(strategy="single_xla", accelerator="xla", devices=1)).launch(train)
    assert (counted.compiled, counted.cut, counted.copied) == (0, 45, 0)


LOADERS = {
    "batch size": data,
    "batch sampler": lambda rows: DataLoader(data(rows).dataset, batch_sampler=BatchSampler(range(rows), 8, False)),
    "one of several": lambda rows: CombinedLoader([data(24), data(rows)], "min_size"),
    "divided evaluation": lambda rows: with_attributes(
        data(rows), batch_sampler=RankBatchSampler(BatchSampler(range(rows), 8, False), None, num_replicas=2, rank=0)
    ),
}


@pytest.mark.parametrize("way", LOADERS)
def test_a_smaller_last_batch_is_logged(caplog, way):
    strategy = trainer().strategy
    with caplog.at_level(logging.WARNING):
        strategy.process_dataloader(LOADERS[way](24))
    assert not caplog.messages
    with caplog.at_level(logging.WARNING):
        strategy.process_dataloader(LOADERS[way](20))
    assert "the last batch of a loader has 4 samples and the others 8" in caplog.text


class Full(BatchSampler):
    """Leaves out what does not fill a batch, in its own way."""

    def __iter__(self):
        yield from (batch for batch in super().__iter__() if len(batch) == self.batch_size)


def test_a_batch_sampler_that_forms_batches_itself_is_not_judged(caplog):
    with caplog.at_level(logging.WARNING):
        trainer().strategy.process_dataloader(DataLoader(data(20).dataset, batch_sampler=Full(range(20), 8, False)))
    assert not caplog.messages


def test_a_fit_logs_a_smaller_last_batch(caplog):
    with caplog.at_level(logging.WARNING):
        trainer(limit_train_batches=1).fit(Regression(), data(20))
    assert "the last batch of a loader has 4 samples and the others 8" in caplog.text


# Batches


class Numbers(NamedTuple):
    inputs: torch.Tensor
    name: str


@dataclasses.dataclass
class Pair:
    inputs: torch.Tensor
    targets: torch.Tensor


class Samples:
    """Has its own way to a device."""

    def __init__(self, inputs):
        self.inputs = inputs

    def to(self, device):
        return Samples(self.inputs.to(device))


def test_batches_of_all_kinds_come_to_the_device():
    strategy = trainer().strategy
    shared = torch.ones(2)
    batch = strategy.batch_to_device(
        {"pair": Pair(shared, shared), "numbers": Numbers(torch.ones(3), "a"), "own": Samples(torch.ones(1)), "n": 3}
    )
    tensors = [batch["pair"].inputs, batch["pair"].targets, batch["numbers"].inputs, batch["own"].inputs]
    assert {tensor.device.type for tensor in tensors} == {"xla"}
    assert (batch["numbers"].name, batch["n"]) == ("a", 3)


def test_loaders_with_workers_are_read_ahead_with_the_same_losses():
    here, ahead = losses_of(loader=data()), losses_of(loader=data(workers=2))
    assert torch.equal(here, ahead)


class Failing(Dataset):
    def __len__(self):
        return 80

    def __getitem__(self, index):
        if index == 50:
            raise ValueError("sample 50 is damaged")
        return torch.ones(16), torch.ones(1)


def test_an_error_in_a_worker_ends_the_fit():
    with pytest.raises(ValueError, match="sample 50 is damaged"):
        trainer().fit(Regression(), DataLoader(Failing(), batch_size=8, num_workers=1))


class Unmovable:
    def __init__(self, samples):
        self.samples = torch.ones(2)


def test_an_error_on_the_way_to_the_device_ends_the_fit():
    with pytest.raises(MisuseError, match="no method to"):
        trainer().fit(Regression(), DataLoader(range(80), batch_size=8, num_workers=1, collate_fn=Unmovable))
