"""A strategy that only says how gradients become one trains as one device does."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from dstrat import GradientSyncStrategy, Trainer, TrainModule
from dstrat.errors import RankFailedError

STEPS = 6


class Averaging(GradientSyncStrategy):
    start_method = "fork"

    def synchronize_gradients(self, gradients):
        for gradient in gradients:
            gradient.copy_(self.reduce(gradient))


class Counting(Averaging):
    calls = 0

    def synchronize_gradients(self, gradients):
        self.calls += 1
        super().synchronize_gradients(gradients)

    def finish_training(self):
        assert self.calls == STEPS


class Forgetful(GradientSyncStrategy):
    start_method = "fork"

    def synchronize_gradients(self, gradients):
        pass


class Net(TrainModule):
    """Has a tied parameter, one that no process uses, one that only some use, and a buffer."""

    def __init__(self, optimizer=torch.optim.AdamW):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second, self.unused = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.sometimes = nn.Parameter(torch.ones(()))
        self.register_buffer("largest", torch.tensor(-99.0))
        self.register_buffer("flag", torch.tensor(False))
        self.optimizer = optimizer

    def training_step(self, batch, batch_idx):
        x = batch[0]
        self.largest = torch.maximum(self.largest, x.max())
        output = self.second(self.first(x).tanh()).sum(1)
        uses = x[:, 0] > 0
        if uses.any():
            output = torch.where(uses, output * self.sometimes, output)
        return nn.functional.mse_loss(output, x.sum(1))

    def configure_optimizers(self):
        return self.optimizer(self.parameters(), lr=0.05)


class Manual(Net):
    """Sums the gradients of two batches by itself."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        with self.no_backward_sync(enabled=batch_idx % 2 == 0):
            self.manual_backward(super().training_step(batch, batch_idx) / 2)
        if batch_idx % 2 == 1:
            self.clip_gradients(self.optimizers(), 0.1)
            self.optimizers().step()
            self.optimizers().zero_grad()


def fit(module, batch_size, **options):
    x = torch.randn(48, 4, generator=torch.Generator().manual_seed(3))
    trainer = Trainer(
        accelerator="cpu",
        max_steps=STEPS,
        max_epochs=-1,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        **options,
    )
    trainer.fit(module, DataLoader(TensorDataset(x), batch_size=batch_size))
    return {name: value.clone() for name, value in module.state_dict().items()}


def assert_same_weights(weights, others):
    for name, value in weights.items():
        if name != "largest":
            torch.testing.assert_close(
                others[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1}])
def test_the_weights_are_those_of_one_device(options, optimizer):
    alone = fit(Net(optimizer), 2, strategy="single_device", **options)
    assert_same_weights(alone, fit(Net(optimizer), 1, strategy=Averaging(), devices=2, **options))


def test_gradients_that_are_accumulated_by_hand_are_averaged_once():
    alone = fit(Manual(), 2, strategy="single_device")
    assert_same_weights(alone, fit(Manual(), 1, strategy=Averaging(), devices=2))


@pytest.mark.parametrize("module", [Net, Manual])
def test_gradients_are_sent_once_in_a_step(module):
    options = {"accumulate_grad_batches": 2} if module is Net else {}
    fit(module(), 1, strategy=Counting(), devices=2, **options)


class Shifted(Net):
    """Its first batch becomes what later ones are shifted by, as in ActNorm layers."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(4))
        self.has_begun = False

    def training_step(self, batch, batch_idx):
        if not self.has_begun:
            self.has_begun = True
            with torch.no_grad():
                self.shift.copy_(self.first_values(batch[0]))
        return super().training_step([batch[0] - self.shift], batch_idx)

    def first_values(self, x):
        return x.mean(0)


class ShiftedByAll(Shifted):
    def first_values(self, x):
        return self.all_gather(x).mean((0, 1))


def test_replicas_without_synchronization_are_an_error():
    with pytest.raises(RankFailedError, match="ranks have other values of the parameter 'sometimes' in optimizer"):
        fit(Net(), 1, strategy=Forgetful(), devices=2)


def test_first_values_that_a_rank_takes_from_its_batch_are_an_error_that_names_the_parameter():
    with pytest.raises(RankFailedError, match=r"'shift' in optimizer step 2 .* Averaging synchronizes gradients"):
        fit(Shifted(), 1, strategy=Averaging(), devices=2)


class Quantized(Net):
    """Has a frozen parameter of which torch computes no norm."""

    def __init__(self):
        super().__init__()
        self.packed = nn.Parameter(torch.ones(4, dtype=torch.uint8), requires_grad=False)


def test_parameters_without_norms_are_not_compared():
    alone = fit(Quantized(), 2, strategy="single_device")
    assert_same_weights(alone, fit(Quantized(), 1, strategy=Averaging(), devices=2))


def test_first_values_from_the_batches_of_all_ranks_are_those_of_one_device():
    alone = fit(Shifted(), 2, strategy="single_device")
    assert_same_weights(alone, fit(ShiftedByAll(), 1, strategy=Averaging(), devices=2))


class DrawsOfItsOwn(Net):
    """Has first values that differ between the processes, and shows what becomes of parameters and buffers."""

    def setup(self, stage):
        torch.manual_seed(self.trainer.global_rank)
        nn.init.normal_(self.first.weight)
        self.largest += self.trainer.global_rank

    def on_train_start(self):
        self.compare()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.compare()

    def compare(self):
        for tensor in (*self.parameters(), *self.buffers()):
            everyone = self.all_gather(tensor.detach())
            assert (everyone == everyone[0]).all()


def test_first_values_and_buffers_are_those_of_the_first_rank():
    fit(DrawsOfItsOwn(), 1, strategy=Averaging(), devices=2)
