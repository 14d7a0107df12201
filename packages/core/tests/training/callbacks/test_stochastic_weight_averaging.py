from __future__ import annotations

import pytest
import torch
from torch.optim.swa_utils import SWALR

from dstrat import Callback, EMAWeightAveraging, ModelCheckpoint, StochasticWeightAveraging
from dstrat.errors import ConflictError, RequestError


class Record(Callback):
    """Keeps the weights after each step, and the learning rates in it."""

    def __init__(self):
        self.weights, self.rates = [], []

    def on_before_optimizer_step(self, trainer, module, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.weights.append(module.layer.weight.detach().cpu().clone())


@pytest.fixture
def train(fit, make_line):
    def train_(averaging, *others, module=None, **options):
        record, module = Record(), module or make_line()
        fit([averaging, record, *others], module=module, validates=False, **({"max_epochs": 5} | options))
        return record, module.layer.weight

    return train_


@pytest.fixture
def scheduled(make_line):
    """A module whose learning rate falls with every step."""

    class Scheduled(type(make_line())):
        def configure_optimizers(self):
            optimizer = super().configure_optimizers()
            scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    return lambda: make_line(Scheduled)


@pytest.mark.parametrize("start", [4, 0.8])  # counted from 1, as in Lightning
def test_the_module_ends_with_the_mean_of_the_ends_of_the_last_epochs(train, start):
    record, weight = train(StochasticWeightAveraging(0.1, swa_epoch_start=start))
    assert torch.allclose(weight, (record.weights[7] + record.weights[9]) / 2)


@pytest.mark.parametrize(("strategy", "epochs"), [("cos", 3), ("linear", 3), ("cos", 0)])
def test_learning_rates_are_those_of_torch_whatever_a_scheduler_does(train, scheduled, caplog, strategy, epochs):
    averaging = StochasticWeightAveraging(0.2, 2, annealing_epochs=epochs, annealing_strategy=strategy)
    record, _ = train(averaging, module=scheduled())
    before = 0.05 * 0.9**2
    optimizer = torch.optim.SGD([torch.ones(1)], lr=before)
    torchs = SWALR(optimizer, 0.2, anneal_epochs=epochs, anneal_strategy=strategy)
    expected = []
    for epoch in range(4):
        optimizer.step()
        if epoch > 0 or epochs == 0:
            torchs.step()
        expected += [optimizer.param_groups[0]["lr"]] * 2  # for two batches
    assert [rate for (rate,) in record.rates] == pytest.approx([0.05, 0.045, *expected])
    told = "from epoch 2 on StochasticWeightAveraging sets the learning rates, and schedulers have no effect"
    assert caplog.messages == [told]


def test_each_parameter_group_and_optimizer_may_have_a_learning_rate_of_its_own(train, make_line, caplog):
    class Grouped(type(make_line())):
        def configure_optimizers(self):
            weight, bias = self.layer.parameters()
            return torch.optim.SGD([{"params": [weight], "lr": torch.tensor(0.05)}, {"params": [bias], "lr": 0.01}])

    record, _ = train(StochasticWeightAveraging([0.2, 0.1], 2, annealing_epochs=0), module=make_line(Grouped))
    assert [float(rate) for rate in record.rates[-1]] == pytest.approx([0.2, 0.1])
    assert not caplog.messages
    wrong = r"swa_lrs=\[0.2, 0.1, 0.3\] has 3 learning rates, and the optimizers have 2 parameter groups"
    with pytest.raises(RequestError, match=wrong):
        train(StochasticWeightAveraging([0.2, 0.1, 0.3]), module=make_line(Grouped))


@pytest.mark.parametrize("steps", [3, 5, 6])
def test_a_run_that_goes_on_ends_with_the_same_weights(train, scheduled, tmp_path, steps):
    def save(folder):
        return ModelCheckpoint(tmp_path / folder, "{step}", save_top_k=-1, every_n_train_steps=1)

    def make():
        return StochasticWeightAveraging(0.2, 2, annealing_epochs=3)

    options = {"enable_checkpointing": True, "max_epochs": 4}
    expected, average = train(make(), save("whole"), module=scheduled(), **options)
    path = tmp_path / "whole" / f"step={steps}.ckpt"
    record, weight = train(make(), save("again"), module=scheduled(), ckpt_path=path, **options)
    assert record.rates == expected.rates[steps:]
    assert torch.equal(weight, average)


def test_a_fraction_needs_a_number_of_epochs(train):
    with pytest.raises(RequestError, match=r"swa_epoch_start=0.8 is a fraction of max_epochs, which is not limited"):
        train(StochasticWeightAveraging(0.1), max_epochs=-1, max_steps=4)


def test_two_callbacks_that_leave_an_average_are_a_conflict(train):
    problem = "StochasticWeightAveraging and EMAWeightAveraging would both leave their average in the module"
    with pytest.raises(ConflictError, match=problem):
        train(StochasticWeightAveraging(0.1), EMAWeightAveraging())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"swa_lrs": 0}, r"swa_lrs=0 must be a number above 0"),
        ({"swa_lrs": [0.1, -1.0]}, r"swa_lrs=\[0.1, -1.0\] must be"),
        ({"swa_lrs": []}, r"swa_lrs=\[\] must be"),
        ({"swa_lrs": "0.1"}, r"swa_lrs='0.1' must be a number above 0, or a list of such numbers, one for each"),
        ({"swa_lrs": ["0.1"]}, r"swa_lrs=\['0.1'\] must be"),
        ({"swa_lrs": torch.tensor(0.5)}, r"swa_lrs=tensor\(0.5000\) must be"),
        ({"swa_lrs": True}, r"swa_lrs=True must be"),
        ({"swa_lrs": None}, r"swa_lrs=None must be"),
        ({"swa_lrs": float("nan")}, r"swa_lrs=nan must be"),
        ({"swa_epoch_start": 1.5}, r"swa_epoch_start=1.5 must be the number of an epoch as an int of at least 1"),
        ({"swa_epoch_start": 0}, r"swa_epoch_start=0 must be"),
        ({"swa_epoch_start": "0.8"}, r"swa_epoch_start='0.8' must be the number of an epoch"),
        ({"swa_epoch_start": torch.tensor(0.5)}, r"swa_epoch_start=tensor\(0.5000\) must be"),
        ({"swa_epoch_start": True}, r"swa_epoch_start=True must be"),
        ({"swa_epoch_start": float("nan")}, r"swa_epoch_start=nan must be"),
        ({"annealing_epochs": True}, r"annealing_epochs=True must be an int of at least 0"),
        ({"annealing_epochs": -1}, r"annealing_epochs=-1 must be an int of at least 0"),
        ({"annealing_epochs": 1.5}, r"annealing_epochs=1.5 must be an int of at least 0"),
        ({"annealing_strategy": "sine"}, r"annealing_strategy='sine' must be 'cos' or 'linear'"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments, message):
    with pytest.raises(RequestError, match=message):
        StochasticWeightAveraging(**{"swa_lrs": 0.1, **arguments})
